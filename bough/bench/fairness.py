"""The effect of one very long prompt on other requests: their time per token beside it, compared with their time
without it.

    bough bench fairness --check
    bough bench fairness MODEL --prompt-len 60000 --streams 4

Without a model it is one of Llama 3.1 8B's shape with random weights. First some streams run alone; then they run while the
long prompt is computed, and short prompts come in between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from bough.bench.engine_settings import NOTE, parse_with_settings
from bough.config.command_line import CommandParser
from bough.core.errors import BoughError, ConfigError
from bough.offline import Engine

Json = dict[str, Any]

MOST_RATIO = 2.0
MOST_SHORT_S = 1.0
_SHAPE: Json = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 128_000, "eos_token_id": 128_001,
}  # fmt: skip
_PATIENCE_S = 30.0
"""Maximum seconds by which a measurement is extended if a stream received no tokens."""
_SETTLE_S = 0.5
"""After the streams' first tokens, before anything is counted."""
_SHORT_EVERY_S = 0.7
_MOST_TOKENS_A_SECOND = 700
"""No stream is faster: it must last as long as it is measured."""


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench fairness",
        usage="bough bench fairness [MODEL] [options]",
        description=__doc__,
        epilog=NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--streams", type=int, default=16, metavar="N", help="number of other users (default: 16)")
    made.add_argument("--input-len", type=int, default=256, metavar="N", help="tokens of their prompts (default: 256)")
    made.add_argument(
        "--prompt-len", type=int, default=130_000, metavar="N", help="tokens of the long prompt (default: 130000)"
    )
    made.add_argument(
        "--idle-seconds", type=float, default=5.0, metavar="X", help="seconds without the long prompt (default: 5)"
    )
    made.add_argument("--seconds", type=float, default=20.0, metavar="X",
                      help="maximum seconds with the long prompt, which is then aborted (default: 20)")  # fmt: skip
    made.add_argument("--seed", type=int, default=1, help="seed of the prompts (default: 1)")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    made.add_argument("--check", action="store_true",
                      help=f"exit with 1 if p99 time per token grows more than {MOST_RATIO:g}-fold, or a short prompt "
                           f"waits longer than {MOST_SHORT_S:g} s")  # fmt: skip
    return made


def main() -> int:
    options, settings = parse_with_settings(parser(), sys.argv[1:])
    if (
        min(options.streams, options.input_len, options.prompt_len) < 1
        or min(options.seconds, options.idle_seconds) <= 0
    ):
        raise ConfigError(what="sizes and seconds must be positive")
    with _model(settings, options) as chosen, Engine(**chosen) as engine:
        facts = asyncio.run(measure(engine, options))
    if options.json:
        print(json.dumps(facts))
    else:
        _show(facts, options)
    problems = verdict(facts)
    for problem in problems if options.check else []:
        print(f"FAIL: {problem}", file=sys.stderr)
    return int(options.check and bool(problems))


@contextlib.contextmanager
def _model(settings: Json, options: argparse.Namespace) -> Iterator[Json]:
    """The engine's settings; without a model name, with a model made for this measurement."""
    base: Json = {"log_level": "warning", "skip_tokenizer_init": True, "incremental_streaming_output": True}
    if settings.get("model_path"):
        yield base | settings
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(_SHAPE))
        made = {"model_path": directory, "load_format": "dummy", "context_length": max(8192, options.prompt_len + 64)}
        yield base | made | settings


@dataclass
class User:
    """One stream, as it arrives."""

    times: list[float] = field(default_factory=list)
    """When each token came."""

    def within(self, begin: float, end: float) -> list[float]:
        return [at for at in self.times if begin <= at <= end]


@dataclass
class Phase:
    """Token times of all users in one phase."""

    tpot_ms: list[float]
    """Mean time per token of each user."""
    gaps_ms: list[float]
    """Gaps between consecutive tokens of a user."""

    def summary(self) -> Json:
        return {
            "p50_tpot_ms": float(np.percentile(self.tpot_ms, 50)),
            "p99_tpot_ms": float(np.percentile(self.tpot_ms, 99)),
            "p50_itl_ms": float(np.percentile(self.gaps_ms, 50)),
            "p99_itl_ms": float(np.percentile(self.gaps_ms, 99)),
            "max_itl_ms": max(self.gaps_ms),
            "tokens": len(self.gaps_ms) + len(self.tpot_ms),
        }


def phase_of(users: list[User], begin: float, end: float) -> Phase:
    """Raises `BoughError` if a user got fewer than two tokens, or all at once: there is no time per token then."""
    tpot, gaps = [], []
    for user in users:
        times = user.within(begin, end)
        if len(set(times)) < 2:
            raise BoughError(
                what=f"a stream got {len(times)} tokens{' at once' if len(times) > 1 else ''} within {end - begin:.1f} s",
                fix="measure longer with --seconds and --idle-seconds, or with a shorter --prompt-len",
            )
        tpot.append(1e3 * (times[-1] - times[0]) / (len(times) - 1))
        gaps += (1e3 * np.diff(times)).tolist()
    return Phase(tpot, gaps)


async def measure(engine: Engine, options: argparse.Namespace) -> Json:
    """Both phases on one engine. Everything that was started has ended when it returns."""
    rng = random.Random(options.seed)
    info = engine.get_server_info()
    vocab, room = int(info["vocab_size"]), int(info["context_length"])
    if options.prompt_len + 2 > room:
        raise ConfigError(
            what=f"a prompt of {options.prompt_len:,} tokens does not fit", why=f"the context is {room:,}",
            fix="choose a smaller --prompt-len, or a larger --context-length",
        )  # fmt: skip

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, vocab) for _ in range(length)]

    long_prompt = prompt(options.prompt_len)
    await _first_token(engine, prompt(options.input_len))  # kernels and graphs
    users = [User() for _ in range(options.streams)]
    lasting = math.ceil(_MOST_TOKENS_A_SECOND * (2 * _SETTLE_S + options.idle_seconds + options.seconds))
    most = min(room - options.input_len - 1, lasting)  # what they may ask for is also what is kept free for them
    tasks = [asyncio.create_task(_follow(engine, prompt(options.input_len), most, user)) for user in users]
    try:
        await _all_running(users, tasks)
        await asyncio.sleep(_SETTLE_S)
        begin = time.perf_counter()
        await asyncio.sleep(options.idle_seconds)
        await _all_moving(users, tasks, begin)
        idle = phase_of(users, begin, time.perf_counter())
        sent = time.perf_counter()
        long = asyncio.create_task(_first_token(engine, long_prompt))
        short = asyncio.create_task(_short_prompts(engine, lambda: prompt(64)))
        await asyncio.wait((long,), timeout=options.seconds)
        await _all_moving(users, tasks, sent)
        ended = time.perf_counter()
        answered = long.done()
        short.cancel()
        waits = await short
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        _still_running(tasks)
        beside = phase_of(users, sent, ended)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "streams": options.streams,
        "prompt_len": options.prompt_len,
        "idle": idle.summary(),
        "beside": beside.summary(),
        "tpot_ratio": beside.summary()["p99_tpot_ms"] / idle.summary()["p99_tpot_ms"],
        "seconds": ended - sent,
        "answered": answered,
        "short_prompts": len(waits),
        "worst_short_ttft_s": max(waits, default=0.0),
    }


async def _news(engine: Engine, prompt: list[int], tokens: int) -> AsyncIterator[Json]:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    made = await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
    return cast(AsyncIterator[Json], made)


async def _follow(engine: Engine, prompt: list[int], tokens: int, user: User) -> None:
    """Records the arrival times of tokens until cancelled. Tokens of one delta have the same time."""
    seen = 0
    async for piece in await _news(engine, prompt, tokens):
        count = int(piece["meta_info"]["completion_tokens"])
        user.times += [time.perf_counter()] * (count - seen)
        seen = count


async def _first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds to the first token."""
    began = time.perf_counter()
    async for _ in await _news(engine, prompt, 1):
        break
    return time.perf_counter() - began


async def _short_prompts(engine: Engine, prompt: Any) -> list[float]:
    """One after the other until cancelled, one that still waits included; their waits."""
    waits: list[float] = []
    began = 0.0
    try:
        while True:
            await asyncio.sleep(_SHORT_EVERY_S)
            began = time.perf_counter()
            waits.append(await _first_token(engine, prompt()))
            began = 0.0
    except asyncio.CancelledError:
        return waits + ([time.perf_counter() - began] if began else [])


async def _all_running(users: list[User], tasks: list[asyncio.Task[None]]) -> None:
    while not all(user.times for user in users):
        _still_running(tasks)
        await asyncio.sleep(0.01)


async def _all_moving(users: list[User], tasks: list[asyncio.Task[None]], begin: float) -> None:
    """Waits until each user has a time per token since `begin`, on a machine that stands still for a moment."""
    give_up = time.perf_counter() + _PATIENCE_S
    while not all(len(set(user.within(begin, math.inf))) > 1 for user in users) and time.perf_counter() < give_up:
        _still_running(tasks)
        await asyncio.sleep(0.01)


def _still_running(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise BoughError(
                what="a stream came to its end while it was measured",
                why="the context has no room for more of its tokens",
                fix="measure for fewer --seconds, or with a larger --context-length",
            )


def verdict(facts: Json) -> list[str]:
    """The limits that were exceeded."""
    problems = []
    if facts["tpot_ratio"] > MOST_RATIO:
        problems.append(f"p99 time per token is {facts['tpot_ratio']:.2f} times its idle value, at most {MOST_RATIO:g}")
    if facts["worst_short_ttft_s"] > MOST_SHORT_S:
        problems.append(f"a short prompt waited {facts['worst_short_ttft_s']:.2f} s, at most {MOST_SHORT_S:g}")
    return problems


def _show(facts: Json, options: argparse.Namespace) -> None:
    print(f"{'':<34}{'alone':>10}{'beside':>10}{'ratio':>8}")
    names = {"p50_tpot_ms": "time per token, median ms", "p99_tpot_ms": "time per token, p99 ms",
             "p50_itl_ms": "between tokens, median ms", "p99_itl_ms": "between tokens, p99 ms",
             "max_itl_ms": "between tokens, longest ms"}  # fmt: skip
    for key, name in names.items():
        idle, beside = facts["idle"][key], facts["beside"][key]
        print(f"{name:<34}{idle:>10.2f}{beside:>10.2f}{beside / idle:>8.2f}")
    how = "answered after" if facts["answered"] else "still computed when given up after"
    print(f"a prompt of {facts['prompt_len']:,} tokens, {how} {facts['seconds']:.1f} s; {options.streams} streams")
    print(f"{facts['short_prompts']} short prompts meanwhile, the slowest waited {facts['worst_short_ttft_s']:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
