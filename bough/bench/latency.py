"""Latency of one batch at a time: prefill time and time per token, for batch sizes and lengths.

    bough bench latency MODEL --batch-size 1 8 64 --input-len 128 1024 --output-len 32

Prefill is the time to the batch's first tokens; decode is what each later step adds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from bough.bench.engine_settings import NOTE, parse_with_settings
from bough.config.command_line import CommandParser
from bough.core.errors import ConfigError
from bough.offline import Engine

Json = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench latency",
        usage="bough bench latency [MODEL] [options]",
        description=__doc__,
        epilog=NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--batch-size", "--batch", type=int, nargs="+", default=[1, 8], metavar="N")
    made.add_argument("--input-len", type=int, nargs="+", default=[128, 1024], metavar="N")
    made.add_argument("--output-len", type=int, nargs="+", default=[32], metavar="N", help="tokens, at least 2")
    made.add_argument("--repeat", type=int, default=3, metavar="N", help="repeats; the median is shown (default: 3)")
    made.add_argument("--seed", type=int, default=1, help="seed of the prompts (default: 1)")
    made.add_argument("--json", action="store_true", help="print one JSON object a line")
    return made


def main() -> None:
    options, settings = parse_with_settings(parser(), sys.argv[1:])
    if min(*options.batch_size, *options.input_len, options.repeat, 1) < 1 or min(options.output_len) < 2:
        raise ConfigError(
            what="sizes must be positive, and --output-len at least 2", why="decode is what follows a token"
        )
    with Engine(**settings) as engine:
        vocab_size = int(engine.get_server_info()["vocab_size"])
        if not options.json:
            print(
                f"{'batch':>6} {'input':>7} {'output':>7} {'prefill ms':>12} {'tokens/s':>12} "
                f"{'decode ms/step':>15} {'tokens/s':>12} {'total ms':>10}"
            )
        for batch in options.batch_size:
            for input_len in options.input_len:
                for output_len in options.output_len:
                    rng = random.Random(options.seed)
                    prompts = [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(batch)]
                    facts = measure(engine, prompts, output_len, options.repeat)
                    print(json.dumps(facts) if options.json else _row(facts), flush=True)


def measure(engine: Engine, prompts: list[list[int]], output_len: int, repeat: int) -> Json:
    """Medians over `repeat` runs of one batch, each on an empty cache; one run before them does not count."""
    first, whole = [], []
    for number in range(repeat + 1):
        first_s, whole_s = _timed(engine, prompts, 1), _timed(engine, prompts, output_len)
        if number:
            first.append(first_s)
            whole.append(whole_s)
    batch, input_len = len(prompts), len(prompts[0])
    prefill_s, total_s = statistics.median(first), statistics.median(whole)
    step_s = max(total_s - prefill_s, 1e-9) / (output_len - 1)
    return {
        "batch_size": batch,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_ms": 1000 * prefill_s,
        "prefill_throughput": batch * input_len / prefill_s,
        "decode_step_ms": 1000 * step_s,
        "decode_throughput": batch / step_s,
        "total_ms": 1000 * total_s,
        "spread_ms": 1000 * (max(whole) - min(whole)),
    }


def _timed(engine: Engine, prompts: list[list[int]], new: int) -> float:
    engine.flush_cache()
    sampling = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
    began = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=sampling)
    return time.perf_counter() - began


def _row(facts: Json) -> str:
    return (
        f"{facts['batch_size']:>6} {facts['input_len']:>7} {facts['output_len']:>7} {facts['prefill_ms']:>12.2f} "
        f"{facts['prefill_throughput']:>12,.0f} {facts['decode_step_ms']:>15.3f} {facts['decode_throughput']:>12,.1f} "
        f"{facts['total_ms']:>10.1f}"
    )


if __name__ == "__main__":
    main()
