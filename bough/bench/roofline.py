"""Times random workloads on several model shapes against the floor that bytes and FLOPs set.

    bough bench roofline --seed 7
    bough bench roofline --seed 7 --minutes 3 --models dense-4k-gqa4 moe-2k-gqa8

Each model is built with dummy weights (experts chosen uniformly) and run by the engine's own loop in this process. Decode
rows find their context in the prefix cache, where it was put without being computed. A floor is the sum over operations
of max(bytes / bandwidth, FLOPs / rate), with the rates that fixed code reaches in the same run: a sum over 4 GiB, and
products of 8,192 x 8,192 x 8,192 repeated for 1.5 s. On a CPU everything is tiny, to try the measurement itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import profile as autograd_profile

from bough.bench.direct_engine import DirectEngine
from bough.bench.roofline_rates import device_state, measure_rates
from bough.bench.roofline_workloads import (
    SHAPES,
    TINY,
    TINY_SHAPES,
    DeviceRates,
    Kind,
    ModelShape,
    Workload,
    WorkloadBounds,
    bound_by,
    draw_workloads,
    floor_s,
)
from bough.core.errors import ConfigError
from bough.core.sampling import SamplingParams
from bough.core.step import I64

GOALS: dict[Kind, tuple[float, float]] = {"decode": (1.25, 1.5), "prefill": (1.2, 1.4)}
"""Median and 95th percentile of time over floor."""
_WORST = 10
_TOP_KERNELS = 8
_WARM_TURNS = 4
_LEAST_TURNS, _MOST_TURNS = 6, 48
"""Decode steps that are timed."""
_MOST_ROUNDS = 12
"""Maximum number of rounds of a short prefill."""


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    workload: str
    kind: Kind
    ms: float
    floor_ms: float
    bound_by: str
    state: dict[str, float] = field(default_factory=dict)
    profile: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.ms / self.floor_ms


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    device = torch.device(options.device if options.device != "auto" else _best_device())
    shapes, bounds = (SHAPES, WorkloadBounds()) if device.type == "cuda" else (TINY_SHAPES, TINY)
    chosen = _chosen(shapes, options.models)
    rates = measure_rates(device)
    print(f"seed {options.seed}: {rates.bytes_per_s / 1e12:.3f} TB/s read, {rates.flops_per_s / 1e12:.1f} TFLOP/s")
    print(_state_line("at the start", device_state(device)), flush=True)
    began = time.perf_counter()
    results: list[Result] = []
    skipped = 0
    for place, shape in enumerate(chosen):
        until = began + 60 * options.minutes * (place + 1) / len(chosen)
        found = _run_model(shape, options, rates, bounds, device, until)
        gc.collect()  # of the engine, whose parts know each other: the next one needs its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
        results += found
        skipped += options.workloads - len(found)
    report(results, rates, skipped=skipped, profiles=not options.no_profiles)
    print(_state_line("at the end", device_state(device)))
    if options.json is not None:
        options.json.write_text(
            json.dumps(
                {"seed": options.seed, "rates": asdict(rates), "results": [asdict(r) for r in results]}, indent=1
            )
        )
    return 0 if results else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bough bench roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True, help="seed of the workloads")
    parser.add_argument("--workloads", type=int, default=16, help="workloads per model (default: 16)")
    parser.add_argument("--models", nargs="+", default=[], help="names of shapes (default: all)")
    parser.add_argument("--minutes", type=float, default=12.0, help="workloads that would begin later are left out")
    parser.add_argument("--kind", choices=["decode", "prefill"], help="only these workloads")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--no-profiles", action="store_true", help="don't profile the worst workloads")
    parser.add_argument("--json", type=Path, help="also write the results there")
    return parser


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _chosen(shapes: Sequence[ModelShape], names: Sequence[str]) -> list[ModelShape]:
    by_name = {shape.name: shape for shape in shapes}
    for name in names:
        if name not in by_name:
            raise ConfigError(what=f"there is no model shape {name!r}", why=f"there are: {', '.join(by_name)}")
    return [by_name[name] for name in names] or list(shapes)


def _run_model(
    shape: ModelShape,
    options: argparse.Namespace,
    rates: DeviceRates,
    bounds: WorkloadBounds,
    device: torch.device,
    until: float,
) -> list[Result]:
    """Results of one model, as many as the time allows."""
    begin = time.perf_counter()
    settings: dict[str, Any] = {"device": device.type, "max_running_requests": bounds.most_rows}
    settings["schedule_conservativeness"] = 0.0
    settings["context_length"] = bounds.most_context + 1024
    if device.type == "cuda":
        settings["mem_fraction_static"] = 0.85
    else:
        settings |= {"max_total_tokens": 4096, "dtype": "float32", "cpu_threads": 1}
    if shape.experts:
        settings["dummy_routing"] = "uniform"
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = DirectEngine(shape.config(), Path(folder), **settings)
    engine.fill_kv()
    kv_tokens = (engine.limits.num_pages - 1) // engine.limits.layout.column_pages * engine.limits.page_size
    drawn = draw_workloads(
        shape,
        options.workloads,
        options.seed,
        kv_tokens=int(kv_tokens * 0.95),
        page_size=engine.limits.page_size,
        bounds=bounds,
    )
    print(f"{shape.name}: built in {time.perf_counter() - begin:.1f} s, room for {kv_tokens:,} KV tokens", flush=True)
    for number, workload in enumerate(drawn):
        if options.kind not in (None, workload.kind):
            continue
        if time.perf_counter() > until:
            break
        run = _Run(engine, workload, bounds.measured_s, seed=1000 * options.seed + number)
        seconds = run.seconds()
        floor = floor_s(shape, workload, rates)
        is_bad = len(results) < _WORST or seconds / floor > 1.1
        profile = run.profile() if is_bad and not options.no_profiles else ()
        run.end()
        result = Result(
            shape.name,
            str(workload),
            workload.kind,
            1e3 * seconds,
            1e3 * floor,
            bound_by(shape, workload, rates),
            device_state(device),
            tuple(profile),
        )
        results.append(result)
        print(_line(result), flush=True)
    engine.runner.clear()
    return results


class _Run:
    """One workload on an engine."""

    def __init__(self, engine: DirectEngine, workload: Workload, measured_s: float, seed: int) -> None:
        self._engine = engine
        self._workload = workload
        self._measured_s = measured_s
        self._rng = np.random.default_rng(seed)

    def seconds(self) -> float:
        """Seconds of a decode step, or of the whole prefill."""
        return self._decode() if self._workload.kind == "decode" else self._prefill()

    def profile(self) -> list[str]:
        """The kernels that take most of the time."""
        cuda = self._engine.device.type == "cuda"
        turns = 2 if self._workload.kind == "decode" else 1
        if self._workload.kind == "prefill":
            self._engine.submit(self._prompts(), self._sampling(1))
        # `torch.profiler` would load a compiler. Without Kineto, a device's times are those of the host's operations.
        with autograd_profile(use_device="cuda" if cuda else None, use_kineto=True, use_cpu=not cuda) as profiler:
            for _ in range(turns):
                self._engine.turn()
            self._engine.runner.clear()
        return _top_kernels(profiler, turns, cuda=cuda)

    def end(self) -> None:
        """Ends all requests and empties the cache."""
        self._engine.drop_all()

    def _decode(self) -> float:
        engine, rows = self._engine, len(self._workload.lengths)
        prompts = self._prompts()
        for prompt in prompts:
            engine.pretend_cached(prompt)
        turns = _MOST_TURNS + _WARM_TURNS + 16
        engine.submit(prompts, self._sampling(turns))
        while len(engine.queues.running) < rows:
            engine.turn()
        for _ in range(_WARM_TURNS):
            engine.turn()
        engine.settle_down()
        engine.turn()
        estimate = engine.timed_turns(2)
        count = min(_MOST_TURNS, max(_LEAST_TURNS, round(self._measured_s / estimate)))
        return engine.timed_turns(count)

    def _prefill(self) -> float:
        """Time of the later rounds, after one that compiles: in the first rounds of a shape, memory is allocated and
        launches are prepared. Once a graph is captured, in passing, the rounds before it don't count."""
        engine = self._engine
        self._round()
        took: list[float] = []
        while len(took) < 2 or (sum(took) < 2.5 * self._measured_s and len(took) < _MOST_ROUNDS):
            graphs = engine.num_graphs
            took.append(self._round())
            if engine.num_graphs != graphs:
                took.clear()
        return statistics.median(took[len(took) // 2 :])

    def _round(self) -> float:
        """Seconds of one prefill of all prompts, of which nothing is cached."""
        engine = self._engine
        engine.submit(self._prompts(), self._sampling(1))
        begin = time.perf_counter()
        engine.finish()
        took = time.perf_counter() - begin
        engine.flush()
        return took

    def _sampling(self, new_tokens: int) -> SamplingParams:
        workload = self._workload
        return SamplingParams(
            max_new_tokens=new_tokens,
            ignore_eos=True,
            temperature=workload.temperature,
            top_p=workload.top_p,
            top_k=workload.top_k,
        )

    def _prompts(self) -> list[I64]:
        """Of decode rows: so long that one token is left to compute, and alike as the workload's tree says."""
        workload, rows = self._workload, len(self._workload.lengths)
        prompts = []
        heads: dict[tuple[int, int], I64] = {}
        for row, length in enumerate(workload.lengths):
            parts = []
            for level, (groups, tokens) in enumerate(workload.tree):
                group = row * groups // rows
                if (level, group) not in heads:
                    heads[level, group] = self._ids(tokens)
                parts.append(heads[level, group])
            own = length - workload.shared_tokens + (workload.kind == "decode")
            parts.append(self._ids(own))
            prompts.append(np.concatenate(parts))
        return prompts

    def _ids(self, count: int) -> I64:
        return self._rng.integers(0, self._engine.vocab, count)


def _top_kernels(profiler: autograd_profile, turns: int, *, cuda: bool) -> list[str]:
    times: list[tuple[float, int, str]] = []
    for event in profiler.key_averages():  # type: ignore[no-untyped-call]
        took = event.self_device_time_total if cuda else event.self_cpu_time_total
        if took > 0 and not (cuda and str(event.device_type) == "DeviceType.CPU"):
            times.append((took, event.count, event.key))
    times.sort(reverse=True)
    whole = sum(took for took, _, _ in times) or 1.0
    launched = sum(count for _, count, _ in times)
    return [
        f"{whole / turns:10.0f} us of kernels, {launched / turns:.0f} launches",
        *(
            f"{took / turns:10.0f} us {took / whole:5.1%} {count / turns:6.0f} x {name[:90]}"
            for took, count, name in times[:_TOP_KERNELS]
        ),
    ]


def report(results: Sequence[Result], rates: DeviceRates, *, skipped: int = 0, profiles: bool = True) -> None:
    """Prints the distribution of time over floor and the worst workloads."""
    print()
    for kind, (median_goal, p95_goal) in GOALS.items():
        ratios = sorted(result.ratio for result in results if result.kind == kind)
        if ratios:
            median, p95 = statistics.median(ratios), ratios[min(len(ratios) - 1, int(0.95 * len(ratios)))]
            print(
                f"{kind}: {len(ratios)} workloads, time / floor: least {ratios[0]:.2f}, median {median:.2f} "
                f"(goal {median_goal}), p95 {p95:.2f} (goal {p95_goal}), most {ratios[-1]:.2f}"
            )
    if skipped:
        print(f"{skipped} workloads were left out: see --minutes, --kind")
    print("\nthe worst:")
    for result in sorted(results, key=lambda result: -result.ratio)[:_WORST]:
        print(_line(result))
        for line in result.profile if profiles else ():
            print("  " + line)


def _line(result: Result) -> str:
    state = f"  {result.state['clock_mhz']:.0f} MHz {result.state['power_w']:.0f} W" if result.state else ""
    return (
        f"{result.ratio:5.2f}  {result.ms:9.3f} ms, floor {result.floor_ms:9.3f}  {result.model}: {result.workload}"
        f"  [{result.bound_by}]{state}"
    )


def _state_line(when: str, state: dict[str, float]) -> str:
    if not state:
        return f"{when}: clock and power are not known"
    return f"{when}: {state['clock_mhz']:.0f} MHz, {state['power_w']:.0f} W, {state['temperature_c']:.0f} degrees"


if __name__ == "__main__":
    sys.exit(main())
