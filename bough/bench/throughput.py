"""Offline throughput: requests and tokens per second of an engine that has all requests from the start.

bough bench throughput MODEL --num-prompts 512 --input-len 1024 --output-len 128
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from bough.bench.engine_settings import NOTE, parse_with_settings
from bough.bench.prompts import BenchPrompt, WordList, add_dataset_flags, describe, make_prompts
from bough.bench.report import confidence
from bough.config.command_line import CommandParser
from bough.core.errors import ConfigError
from bough.offline import Engine

Json = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench throughput",
        usage="bough bench throughput [MODEL] [options]",
        description=__doc__,
        epilog=NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_dataset_flags(made, default="random-ids", num_prompts=100)
    made.add_argument("--repeat", type=int, default=1, metavar="N", help="runs; the cache is emptied before each")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return made


def main() -> None:
    options, settings = parse_with_settings(parser(), sys.argv[1:])
    with Engine(**settings) as engine:
        size = int(engine.get_server_info()["vocab_size"])
        prompts = make_prompts(options, WordList(tokenizer=engine.tokenizer, size=size))
        _run(engine, prompts[:1])
        runs = []
        for _ in range(max(1, options.repeat)):
            engine.flush_cache()
            runs.append(_run(engine, prompts))
    if options.json:
        print(json.dumps(runs[-1] if len(runs) == 1 else {**runs[-1], "runs": runs}, indent=2))
        return
    print(f"{options.dataset_name}: {describe(prompts)}\n")
    for facts in runs:
        print(_show(facts) + "\n")
    if len(runs) > 1:
        mean, half = confidence([facts["output_throughput"] for facts in runs])
        print(f"output tokens/s over {len(runs)} runs: {mean:,.1f} +- {half:,.1f}")


def _run(engine: Engine, prompts: list[BenchPrompt]) -> Json:
    """Runs all prompts in one call."""
    if any(prompt.messages is not None for prompt in prompts):
        raise ConfigError(what="the offline engine takes texts and token ids", fix="use `prompt` in the dataset")
    sampling = [{"temperature": 0.0, "max_new_tokens": prompt.output_len, "ignore_eos": True} for prompt in prompts]
    ids = [prompt.ids for prompt in prompts if prompt.ids is not None]
    texts = [prompt.text for prompt in prompts if prompt.ids is None]
    if ids and texts:
        raise ConfigError(what="the dataset mixes texts and token ids", fix="use one of them")
    began = time.perf_counter()
    answers = engine.generate(texts or None, sampling, ids or None)
    duration = time.perf_counter() - began
    assert isinstance(answers, list), "a batch gives a list"
    metas = [answer["meta_info"] for answer in answers]
    inputs, outputs, cached = (
        sum(int(meta[name]) for meta in metas) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    )
    return {
        "num_requests": len(prompts),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": cached,
        "request_throughput": len(prompts) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_throughput": (inputs + outputs) / duration,
    }


def _show(facts: Json) -> str:
    rows = [
        ("duration", f"{facts['duration']:.2f} s"),
        ("requests/s", f"{facts['request_throughput']:.2f}"),
        ("input tokens/s", f"{facts['input_throughput']:,.1f}"),
        ("output tokens/s", f"{facts['output_throughput']:,.1f}"),
        ("tokens/s in all", f"{facts['total_throughput']:,.1f}"),
        ("prompt tokens cached", f"{100 * facts['total_cached_tokens'] / max(1, facts['total_input_tokens']):.1f} %"),
    ]
    return "\n".join(f"  {name:<22} {text}" for name, text in rows)


if __name__ == "__main__":
    main()
