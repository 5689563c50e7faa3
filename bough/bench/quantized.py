"""Quantised weights and KV on one GPU: every row that has a goal, each with its plain counterpart, in one command.

    bough bench quantized --json rows.jsonl
    bough bench quantized --only fp8 kv --models benchmarks/models

Runs one engine after the other, each in a process of its own, with dummy weights of a configuration: FP8, INT4 in GPTQ's
layout and bf16 of Llama-3.1-8B, FP8 blocks and bf16 of Qwen3-30B-A3B with uniform routing, MXFP4 of gpt-oss-20b, FP8 and
16-bit KV. `bough bench kernels packed` measures the products alone, of these and of other formats, GGUF's included. Prints
a JSON object per workload, then how each row stands to its goal. Goals in milliseconds are for an H200.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bough.bench.offline import CountsTokens, Timer, open_engine, random_prompts
from bough.bench.shapes import decode_ms, ragged
from bough.core.errors import ConfigError

Tell = Callable[[str, float, str], None]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What an engine is measured with: (batch, context) of decodes, (prompts, length) of prefills."""

    decode: tuple[tuple[int, int], ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class QuantizedRun:
    """One engine."""

    model: str
    settings: dict[str, Any]
    shapes: Shapes
    goals: dict[str, float] = field(default_factory=dict)
    """By workload, in its unit."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Required speed relative to another engine; below 1: allowed slowdown."""

    run: str
    than: str
    workload: str
    least: float


_USUAL: Final = Shapes(
    decode=((1, 128), (4, 2000), (24, 1000), (100, 600), (200, 300)),
    prefill=((1, 300), (1, 1000), (4, 4000), (1, 15000), (64, 500)),
)
_LLAMA, _QWEN, _OSS = "llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"
_UNIFORM: Final = {"dummy_routing": "uniform"}


def _goals(decode: Sequence[float], prefill: Sequence[float]) -> dict[str, float]:
    names = [f"decode_bs{batch}_ctx{context}" for batch, context in _USUAL.decode]
    names += [f"prefill_{count}x{length}" for count, length in _USUAL.prefill]
    return dict(zip(names, (*decode, *prefill), strict=True))


_INT4: Final = Shapes(((1, 128), (16, 128)), ((1, 4096), (4, 4000), (1, 15000)))
_MOE: Final = Shapes(((1, 128), (64, 128)), ((4, 4000),))
_KV: Final = Shapes(((200, 2000),))
RUNS: Final[dict[str, QuantizedRun]] = {
    "bf16": QuantizedRun(_LLAMA, {}, Shapes((*_USUAL.decode, (16, 128)), (*_USUAL.prefill, (1, 4096)), ragged=True)),
    "fp8": QuantizedRun(
        _LLAMA,
        {"quantization": "fp8"},
        Shapes(_USUAL.decode, _USUAL.prefill, ragged=True),
        {**_goals((2.6, 2.9, 4.2, 5.8, 7.4), (12, 20, 235, 290, 440)), "300_lognormal": 6.6},
    ),
    "int4": QuantizedRun(
        _LLAMA, {"quantization": "gptq"}, _INT4, {"decode_bs1_ctx128": 2.0, "decode_bs16_ctx128": 2.6}
    ),
    "moe-bf16": QuantizedRun(_QWEN, _UNIFORM, _MOE),
    "moe-fp8": QuantizedRun(_QWEN, {**_UNIFORM, "quantization": "fp8_block"}, _MOE),
    "mxfp4": QuantizedRun(
        _OSS,
        {**_UNIFORM, "quantization": "mxfp4"},
        _USUAL,
        _goals((1.7, 3.2, 5.2, 7.0, 9.0), (13, 19, 190, 200, 370)),
    ),
    "kv-bf16": QuantizedRun(_LLAMA, {"kv_cache_dtype": "bfloat16"}, _KV),
    "kv-fp8": QuantizedRun(_LLAMA, {"kv_cache_dtype": "fp8_e4m3"}, _KV),
}
GAINS: Final = (
    *(Gain("int4", "bf16", f"prefill_{count}x{length}", 0.9) for count, length in _INT4.prefill),
    Gain("moe-fp8", "moe-bf16", "decode_bs1_ctx128", 1.2),
    Gain("moe-fp8", "moe-bf16", "decode_bs64_ctx128", 1.6),
    Gain("kv-fp8", "kv-bf16", "decode_bs200_ctx2000", 1.35),
    Gain("kv-fp8", "kv-bf16", "kv_tokens", 1.9),
)


def measure(timer: Timer, shapes: Shapes, tell: Tell) -> None:
    """Calls `tell` with each workload, its value and its unit."""
    timer.engine.generate(random_prompts(8, 200, 3), [16] * 8)
    for batch, context in shapes.decode:
        tell(f"decode_bs{batch}_ctx{context}", decode_ms(timer, batch, context, 128), "ms")
    for count, length in shapes.prefill:
        prompts = random_prompts(count, length, count * 7 + length)
        timer.engine.generate(prompts, [1] * count)
        tell(f"prefill_{count}x{length}", 1e3 * timer.median_s(prompts, 1), "ms")
    if shapes.ragged:
        ragged(timer, tell)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results relative to their goals: `share` is at least 1 if the goal is reached."""
    found = {(row["run"], row["workload"]): float(row["value"]) for row in rows}
    out: list[dict[str, Any]] = []
    for name, run in RUNS.items():
        for workload, goal in run.goals.items():
            value = found.get((name, workload))
            if value is not None:
                out.append(_verdict(name, workload, f"at most {goal}", value, goal / value))
    for gain in GAINS:
        ours, theirs = found.get((gain.run, gain.workload)), found.get((gain.than, gain.workload))
        if ours is not None and theirs is not None:
            times = ours / theirs if gain.workload == "kv_tokens" else theirs / ours
            wanted = f"{gain.least} x {gain.than}"
            out.append(_verdict(gain.run, gain.workload, wanted, round(times, 3), times / gain.least))
    return out


def _verdict(run: str, workload: str, goal: str, value: float, share: float) -> dict[str, Any]:
    return {
        "run": run, "workload": workload, "goal": goal, "value": value, "share": round(share, 3), "reached": share >= 1,
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="bough bench quantized", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--models", type=Path, default=Path("benchmarks/models"), help="directory with the configurations"
    )
    made.add_argument("--only", nargs="+", default=list(RUNS), help=f"some of {', '.join(RUNS)}")
    made.add_argument("--repeats", type=int, default=3, help="repeats of each workload (default: 3)")
    made.add_argument("--engine", default="bough", help="bough (default) or module:factory")
    made.add_argument("--json", type=Path, help="also append the rows there, a JSON object per line")
    made.add_argument("--run", default="", help=argparse.SUPPRESS)  # in the process that runs one engine
    return made


def _run_one(options: argparse.Namespace) -> int:
    run = RUNS[options.run]
    engine = open_engine(options.engine, str(options.models / run.model), dict(run.settings))

    def tell(workload: str, value: float, unit: str) -> None:
        row = {"run": options.run, "workload": workload, "value": round(value, 4), "unit": unit}
        print(json.dumps(row), flush=True)

    measure(Timer(engine, options.repeats), run.shapes, tell)
    tokens = engine.kv_tokens() if isinstance(engine, CountsTokens) else 0
    if tokens:
        tell("kv_tokens", tokens, "tokens")
    return 0


def _rows_of(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Runs one engine in a process of its own; what it prints beside rows goes on."""
    command = [sys.executable, "-m", "bough.bench.quantized", "--run", name, "--models", str(options.models)]
    command += ["--repeats", str(options.repeats), "--engine", options.engine]
    rows: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                rows.append(json.loads(line))
    if process.returncode:
        print(f"{name}: ended with status {process.returncode}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.run:
        return _run_one(options)
    unknown = [name for name in options.only if name not in RUNS]
    if unknown:
        raise ConfigError(what=f"there is no run {unknown[0]!r}", why=f"there are: {', '.join(RUNS)}", param="only")
    rows = [row for name in options.only for row in _rows_of(options, name)]
    verdict = verdicts(rows)
    for each in verdict:
        print(json.dumps(each), flush=True)
    if options.json is not None:
        with options.json.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in (*rows, *verdict))
    return 0 if rows and all(each["reached"] for each in verdict) else 1


if __name__ == "__main__":
    sys.exit(main())
