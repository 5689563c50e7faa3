"""The cost of a grammar per token, and the number of steps that forced tokens save.

    bough bench grammar MODEL --batch-size 1 64 --output-len 128

Time per token is taken without a grammar, under a schema of free strings (a mask for every token, nothing certain), and
under one with long property names. Steps are counted under the latter with jumping ahead and without: requests with
log-probabilities are sampled token by token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from bough.bench.engine_settings import NOTE, parse_with_settings
from bough.bench.schemas import RECORD, SCHEMAS, Json
from bough.config.command_line import CommandParser
from bough.core.errors import ConfigError
from bough.offline import Engine


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench grammar",
        usage="bough bench grammar [MODEL] [options]",
        description=__doc__,
        epilog=NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--batch-size", "--batch", type=int, nargs="+", default=[1, 8], metavar="N")
    made.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens of an answer (default: 64)")
    made.add_argument(
        "--requests", type=int, default=4, metavar="N", help="requests whose steps are counted (default: 4)"
    )
    made.add_argument("--repeat", type=int, default=3, metavar="N", help="repeats; the median is shown (default: 3)")
    made.add_argument("--json", action="store_true", help="print one JSON object a line")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    options, settings = parse_with_settings(parser(), list(sys.argv[1:] if argv is None else argv))
    if min(*options.batch_size, options.requests, options.repeat) < 1 or options.output_len < 2:
        raise ConfigError(
            what="sizes must be positive, and --output-len at least 2", why="time per token follows a token"
        )
    with Engine(**settings) as engine:
        rows = [cost(engine, batch, options.output_len, options.repeat) for batch in options.batch_size]
        saved = steps(engine, options.requests)
    if options.json:
        for facts in [*rows, saved]:
            print(json.dumps(facts))
        return
    print(f"{'batch':>6} {'free ms/token':>14} {'strings':>10} {'cost':>7} {'records':>10} {'cost':>7}")
    for row in rows:
        print(
            f"{row['batch_size']:>6} {row['free_ms']:>14.3f} {row['strings_ms']:>10.3f} {row['strings_cost']:>+7.1%} "
            f"{row['records_ms']:>10.3f} {row['records_cost']:>+7.1%}"
        )
    print(
        f"\n{saved['requests']} records, {saved['literal_share']:.0%} of their tokens literal: {saved['tokens']} tokens in "
        f"{saved['steps']} steps, {saved['fewer_steps']:.1%} fewer than token by token"
    )


def cost(engine: Engine, batch: int, output_len: int, repeat: int) -> Json:
    """Time per output token, without a grammar and with two, one after another in turns. Prefill, timed with one token, is
    taken off; a cost is the median of what each turn says."""
    ways: dict[str, Json] = {
        "free": {},
        "strings": {"json_schema": SCHEMAS["strings"]},
        "records": {"json_schema": SCHEMAS["records"]},
    }
    for constraint in ways.values():
        _timed(engine, batch, output_len, constraint)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, constraint in ways.items():
            whole, first = (_timed(engine, batch, length, constraint) for length in (output_len, 1))
            taken[name].append(1e3 * (whole - first) / (output_len - 1))
    facts: Json = {"batch_size": batch, "output_len": output_len, "repeat": repeat}
    facts |= {f"{name}_ms": statistics.median(values) for name, values in taken.items()}
    for name in ("strings", "records"):
        turns = zip(taken[name], taken["free"], strict=True)
        facts[f"{name}_cost"] = statistics.median(with_it / without - 1.0 for with_it, without in turns)
    return facts


def _timed(engine: Engine, batch: int, num_tokens: int, constraint: Json) -> float:
    prompts = [f"A list, number {number}:" for number in range(batch)]
    sampling = {"temperature": 0.8, "sampling_seed": 1, "max_new_tokens": num_tokens, "ignore_eos": True, **constraint}
    began = time.perf_counter()
    engine.generate(prompts, sampling)
    return time.perf_counter() - began


def steps(engine: Engine, num_requests: int) -> Json:
    """Steps of the model for some records, one after another, with jumping ahead and without."""
    tokens, taken = _records(engine, num_requests)
    tokens_without, without = _records(engine, num_requests, return_logprob=True)
    return {
        "requests": num_requests,
        "tokens": tokens,
        "steps": taken,
        "literal_share": num_requests * _literal_tokens(engine) / tokens,
        "steps_per_token": taken / tokens,
        "steps_per_token_without": without / tokens_without,
        "fewer_steps": 1.0 - (taken / tokens) / (without / tokens_without),
    }


def _literal_tokens(engine: Engine) -> int:
    """Tokens of a record that are the same for all customers: names, quotes, colons, commas and braces."""
    assert engine.tokenizer is not None, "a grammar needs a tokenizer"
    bare = json.dumps(dict.fromkeys(RECORD["properties"], 0))
    return len(engine.tokenizer.encode(bare, add_special_tokens=False)) - 2 * len(RECORD["properties"])


def _records(engine: Engine, num_requests: int, **options: Any) -> tuple[int, int]:
    """Tokens and steps."""
    before = _num_steps(engine)
    tokens = 0
    for number in range(num_requests):
        sampling = {
            "temperature": 0.8, "sampling_seed": number, "max_new_tokens": 400, "json_schema": json.dumps(RECORD),
        }  # fmt: skip
        answer = engine.generate(f"The record of customer {number} as JSON: ", sampling, **options)
        assert isinstance(answer, dict), "one prompt has one answer"
        tokens += answer["meta_info"]["completion_tokens"]
    return tokens, _num_steps(engine) - before


def _num_steps(engine: Engine) -> int:
    return int(engine.get_server_info()["internal_states"][0]["counters"]["steps"])
