"""Workloads of many other shapes than the suite's, through an engine's offline API.

    bough bench shapes benchmarks/models/qwen3-8b
    bough bench shapes benchmarks/models/qwen3-30b-a3b --groups decode prefill --settings '{"dummy_routing": "uniform"}'

Groups: decode (batches and contexts), long (long contexts), sample, prefill (few and many prompts), small (1,024 short
requests), ragged (300 requests of log-normal lengths), tree (prompts that share two or three levels of prefixes), turns
(chats); and huge (a prompt of 128,000 tokens and decode after it), which runs only if it is named and needs a model and
`--settings '{"context_length": 131072}'` for it. Prints a JSON object per workload. Results: benchmarks/h200/README.md.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bough.bench.offline import Prompts, Timer, random_prompts
from bough.bench.suite import parser, start
from bough.core.errors import ConfigError

Tell = Callable[[str, float, str], None]


def decode(timer: Timer, tell: Tell) -> None:
    for batch, context in ((1, 128), (4, 2000), (24, 1000), (100, 600), (200, 300)):
        tell(f"decode_bs{batch}_ctx{context}", decode_ms(timer, batch, context, 128), "ms")


def long(timer: Timer, tell: Tell) -> None:
    for batch, context in ((1, 15000), (24, 8000)):
        tell(f"decode_bs{batch}_ctx{context}", decode_ms(timer, batch, context, 64), "ms")


def huge(timer: Timer, tell: Tell) -> None:
    prompts = random_prompts(1, 128_000, 128)
    tell("prefill_1x128000", timer.median_s(prompts, 1), "s")
    tell("decode_bs1_ctx128000", decode_ms(timer, 1, 128_000, 64), "ms")


def sample(timer: Timer, tell: Tell) -> None:
    tell("decode_bs64_t0.8_p0.95", decode_ms(timer, 64, 128, 128, {"temperature": 0.8, "top_p": 0.95}), "ms")


def prefill(timer: Timer, tell: Tell) -> None:
    for count, length in ((1, 300), (1, 1000), (4, 4000), (1, 15000), (64, 500)):
        prompts = random_prompts(count, length, count * 7 + length)
        timer.engine.generate(prompts, [1] * count)
        tell(f"prefill_{count}x{length}", 1e3 * timer.median_s(prompts, 1), "ms")


def small(timer: Timer, tell: Tell) -> None:
    prompts = [random_prompts(1, 24 + i % 17, 9000 + i)[0] for i in range(1024)]
    tell("1024_small_32in_32out", timer.median_s(prompts, 32), "s")


def ragged(timer: Timer, tell: Tell) -> None:
    rng = random.Random(11)
    lengths = [int(min(8000, rng.lognormvariate(6, 1.1))) for _ in range(300)]
    prompts = [random_prompts(1, max(1, length), 7000 + i)[0] for i, length in enumerate(lengths)]
    new_tokens = [int(min(600, rng.lognormvariate(4.5, 0.9))) + 1 for _ in prompts]
    tell("300_lognormal", timer.median_s(prompts, new_tokens), "s")


def tree(timer: Timer, tell: Tell) -> None:
    """256 requests: 16 groups of 16 below one prefix; and 4 groups of 4 groups of 16."""
    tell("tree_2level_256", timer.median_s(_tree_prompts((1, 1000), (16, 900)), 48), "s")
    tell("tree_3level_256", timer.median_s(_tree_prompts((1, 1000), (4, 600), (16, 600)), 48), "s")


def turns(timer: Timer, tell: Tell) -> None:
    """48 chats of 5 turns: each question follows the answers before it."""
    took = []
    for _ in range(timer.repeats):
        timer.engine.flush()
        history = random_prompts(48, 400, 21)
        begin = time.perf_counter()
        for turn in range(5):
            answers = timer.engine.generate(history, [64] * len(history))
            questions = random_prompts(48, 120, 300 + turn)
            history = [[*h, *a, *q] for h, a, q in zip(history, answers, questions, strict=True)]
        took.append(time.perf_counter() - begin)
    tell("48_chats_5_turns", min(took), "s")


GROUPS: dict[str, Callable[[Timer, Tell], None]] = {
    "decode": decode,
    "long": long,
    "huge": huge,
    "sample": sample,
    "prefill": prefill,
    "small": small,
    "ragged": ragged,
    "tree": tree,
    "turns": turns,
}
USUAL = [name for name in GROUPS if name != "huge"]


_IDLE_S = 0.2
"""An engine captures graphs while nothing is asked of it."""


def decode_ms(
    timer: Timer, batch: int, context: int, new_tokens: int, sampling: dict[str, float] | None = None
) -> float:
    """With prompts that are cached, so that the difference is decode alone, and after both forms ran once: what is compiled
    or captured by the first of them would otherwise be counted, on either side of the difference."""
    prompts = random_prompts(batch, context, batch * 31 + context)
    for count in (1, 1, 1 + new_tokens):
        timer.engine.generate(prompts, [count] * batch)
        time.sleep(_IDLE_S)
    return timer.decode_ms(prompts, new_tokens, sampling=sampling or {})


def _tree_prompts(*levels: tuple[int, int], rows: int = 256, own: int = 60) -> Prompts:
    """Shuffled prompts below a tree of (nodes, tokens of each) by level, each with `own` tokens of its own."""
    heads = {
        (level, node): random_prompts(1, tokens, 1 + 1000 * level + node)[0]
        for level, (count, tokens) in enumerate(levels)
        for node in range(count)
    }
    prompts: Prompts = []
    for row in range(rows):
        path = [heads[level, row * count // rows] for level, (count, _) in enumerate(levels)]
        (end,) = random_prompts(1, own, 9000 + row)
        prompts.append([*(token for part in path for token in part), *end])
    random.Random(2).shuffle(prompts)
    return prompts


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser("shapes", __doc__)
    flags.add_argument(
        "--groups", nargs="+", default=USUAL, help=f"some of {', '.join(GROUPS)} (default: all but huge)"
    )
    options = flags.parse_args(argv)
    unknown = [name for name in options.groups if name not in GROUPS]
    if unknown:
        raise ConfigError(what=f"there is no group {unknown[0]!r}", why=f"there are: {', '.join(GROUPS)}")
    timer, tell = start(options)

    def row(workload: str, value: float, unit: str) -> None:
        found: dict[str, Any] = {"workload": workload, "value": round(value, 4), "unit": unit}
        tell(found)

    timer.engine.generate(random_prompts(8, 200, 3), [16] * 8)
    for name in options.groups:
        GROUPS[name](timer, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
