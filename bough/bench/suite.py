"""Ten workloads of an 8B model through an engine's offline API: start, decode, prefill, mixed, shared and cached prompts.

    bough bench suite benchmarks/models/llama-3.1-8b
    bough bench suite benchmarks/models/llama-3.1-8b --engine vllm

Engines get the same token ids, greedy sampling, no end of text, random bf16 weights of the configuration. Decode is what 257
tokens take longer than one. Prints a JSON object per workload. Results: benchmarks/h200/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.bench.offline import BoughOffline, Prompts, Timer, open_engine, random_prompts


@dataclass(frozen=True, slots=True)
class SuiteSizes:
    """Sizes of the workloads; small ones test the benchmark itself."""

    decode_batches: tuple[int, ...] = (1, 8, 64, 256)
    decode_prompt: int = 128
    decode_tokens: int = 256
    lone_prompt: int = 2048
    prompts: tuple[int, int] = (8, 8192)
    mixed: int = 512
    mixed_lengths: tuple[int, int] = (64, 1984)
    mixed_tokens: int = 128
    groups: tuple[int, int] = (8, 64)
    shared_prompt: int = 2048
    own_prompt: int = 128
    shared_tokens: int = 64
    cached_prompt: int = 512


SMALL = SuiteSizes(
    decode_batches=(1, 4),
    decode_prompt=8,
    decode_tokens=4,
    lone_prompt=32,
    prompts=(2, 16),
    mixed=4,
    mixed_lengths=(4, 24),
    mixed_tokens=4,
    groups=(2, 2),
    shared_prompt=16,
    own_prompt=8,
    shared_tokens=4,
    cached_prompt=32,
)


def run_suite(timer: Timer, sizes: SuiteSizes, tell: Callable[[dict[str, Any]], None]) -> None:
    """Calls `tell` with a row for each workload."""

    def row(workload: str, seconds: float, **more: float) -> None:
        tell({"workload": workload, "seconds": round(seconds, 4), **{name: round(v, 2) for name, v in more.items()}})

    engine = timer.engine
    engine.generate(random_prompts(4, sizes.decode_prompt, 9), [16] * 4)
    for batch in sizes.decode_batches:
        prompts = random_prompts(batch, sizes.decode_prompt, batch)
        step_ms = timer.decode_ms(prompts, sizes.decode_tokens, flush=True)
        row(f"decode_bs{batch}", step_ms * sizes.decode_tokens / 1e3, tpot_ms=step_ms, out_tok_s=1e3 * batch / step_ms)
    took = timer.median_s(random_prompts(1, sizes.lone_prompt, 77), 1)
    row(f"prefill_1x{sizes.lone_prompt}", took, in_tok_s=sizes.lone_prompt / took, ttft_ms=1e3 * took)
    count, length = sizes.prompts
    took = timer.median_s(random_prompts(count, length, 78), 1)
    row(f"prefill_{count}x{length}", took, in_tok_s=count * length / took)
    mixed = _mixed(sizes)
    took = timer.median_s(mixed, sizes.mixed_tokens)
    out = sizes.mixed * sizes.mixed_tokens
    row(f"mixed_{sizes.mixed}", took, tok_s=(sum(map(len, mixed)) + out) / took, out_tok_s=out / took)
    groups, rows = sizes.groups
    took = timer.median_s(_shared(sizes), sizes.shared_tokens)
    row(f"shared_prefix_{groups}x{rows}", took, req_s=groups * rows / took)
    prompt = random_prompts(1, sizes.cached_prompt, 99)
    engine.generate(prompt, [1])
    took = timer.median_s(prompt, 1, flush=False, repeats=5)
    row(f"cached_ttft_{sizes.cached_prompt}", took, ttft_ms=1e3 * took)


def _mixed(sizes: SuiteSizes) -> Prompts:
    rng = random.Random(5)
    return [random_prompts(1, rng.randrange(*sizes.mixed_lengths), 1000 + i)[0] for i in range(sizes.mixed)]


def _shared(sizes: SuiteSizes) -> Prompts:
    groups, rows = sizes.groups
    prompts: Prompts = []
    for group in range(groups):
        (prefix,) = random_prompts(1, sizes.shared_prompt, 5000 + group)
        prompts += random_prompts(rows, sizes.shared_prompt + sizes.own_prompt, 6000 + group, prefix)
    random.Random(1).shuffle(prompts)
    return prompts


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Flags that measurements of offline engines have in common."""
    made = argparse.ArgumentParser(
        prog=f"bough bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("model", help="directory with the model's config.json")
    made.add_argument("--engine", default="bough", help="bough (default), vllm, sglang or module:factory")
    made.add_argument("--settings", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    made.add_argument("--repeats", type=int, default=3, help="repeats of each workload (default: 3)")
    made.add_argument("--json", type=Path, help="also append the rows there, a JSON object per line")
    return made


def start(options: argparse.Namespace) -> tuple[Timer, Callable[[dict[str, Any]], None]]:
    """Starts the engine and reports the time to its first answer. Returns its timer, and the function that reports
    rows."""

    def tell(row: dict[str, Any]) -> None:
        line = json.dumps({"engine": options.engine, "config": Path(options.model).name, **row})
        print(line, flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(line + "\n")

    begin = time.perf_counter()
    engine = open_engine(options.engine, options.model, options.settings)
    engine.generate(random_prompts(2, 64, 0), [8, 8])
    tell({"workload": "startup", "seconds": round(time.perf_counter() - begin, 3)})
    return Timer(engine, options.repeats), tell


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("suite", __doc__).parse_args(argv)
    timer, tell = start(options)
    run_suite(timer, SuiteSizes(), tell)
    return 0


class SuiteEngine:
    """bough for scripts that time any engine: prompts and one number of tokens in, lengths out."""

    def __init__(self, model: str, **settings: Any) -> None:
        self._engine = BoughOffline(model, **settings)

    def generate(self, ids: Prompts, new: int) -> list[int]:
        """Generates `new` tokens greedily for each prompt; returns how many each got."""
        return [len(answer) for answer in self._engine.generate(ids, [new] * len(ids))]

    def flush(self) -> None:
        self._engine.flush()


def engine(model: str, **settings: Any) -> SuiteEngine:
    return SuiteEngine(model, **settings)


if __name__ == "__main__":
    sys.exit(main())
