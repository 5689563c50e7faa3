"""What the scheduler's constants do: one at a time is changed, and the same traffic is scheduled in simulated time.

    python benchmarks/scheduler_constants.py [NAME ...]

The scheduler, the prefix cache and the loop are the real ones; the device is a cost model of Llama 3.1 8B in bf16 on one
H200 (`STEP_MS`, `TOKEN_MS`, `TILE`). A simulated second is the same on every machine, so results can be compared between
commits. They say how one value compares with another, not how fast a server is. Names in capitals are constants of modules,
others are defaults of `Limits`. Results: `docs/decisions/scheduler_constants.md`.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from bough.cache import radix
from bough.cache.prefix import PrefixCache
from bough.core.messages import Generate, ToDetokenizer, ToEngine, Tokens, pack_ids
from bough.core.sampling import SamplingParams
from bough.core.step import Mask, Outcome, RunnerLimits, Step
from bough.engine.loop import Loop
from bough.scheduler import estimate, learn, plan, policy, prefill, queues as queueing
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Queues

STEP_MS = 5.2
"""A decode step: reading the weights."""
TOKEN_MS = 0.028
"""Each prompt token on top, in large steps."""
TILE = 512
"""Tokens by which the cost of large steps grows."""
COPY_MS = 0.01
"""A step that copies pages launches one kernel more; the copies themselves (2 MiB a page) take 1 us each."""
PAGE = 16
NUM_PAGES = 30_000
CONTEXT = 65_536
STOP = 3
"""The token with which requests end by themselves, where a scenario has any that do."""
_MANY = 1000


class Device:
    """Computes nothing, and takes its time on the simulation's clock."""

    def __init__(self, limits: RunnerLimits) -> None:
        self.limits = limits
        self.now_s = 0.0
        self.most_tokens = limits.max_step_tokens
        """A step with more runs the device out of memory."""
        self.slow_every = 0
        """One in this many steps takes 20 times as long; 0: none does."""
        self.stop_chances: tuple[tuple[float, float], ...] = ()
        """From which second on a token is `STOP` with which probability."""
        self._dice = np.random.default_rng(5)
        self._steps = 0
        self._free_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def launch(self, step: Step) -> Launched:
        new = step.num_tokens - step.num_decode_tokens
        if new > self.most_tokens:
            raise MemoryError("the simulated device is out of memory")
        if new > 4 * TILE:
            new = -(-step.num_tokens // TILE) * TILE
        self._steps += 1
        cost_ms = STEP_MS + TOKEN_MS * new + (COPY_MS + 0.001 * len(step.copy_to) if len(step.copy_to) else 0.0)
        if self.slow_every and self._steps % self.slow_every == 0:
            cost_ms *= 20
        self._free_s = max(self.now_s, self._free_s) + cost_ms / 1000
        return Launched(self, step, self._free_s)

    def tokens(self, num_rows: int) -> npt.NDArray[np.int32]:
        chance = max([(0.0, 0.0), *(each for each in self.stop_chances if each[0] <= self.now_s)])[1]
        return np.where(self._dice.random((num_rows, 1)) < chance, STOP, 7).astype(np.int32)

    def clear(self) -> None:
        pass


@dataclass
class Launched:
    device: Device
    step: Step
    ready_s: float
    needs_masks: bool = False

    def sample(self, masks: Mask) -> None:
        raise AssertionError("no request has a grammar")

    def wait(self) -> Outcome:
        self.device.now_s = max(self.device.now_s, self.ready_s)
        counts = self.step.samples.astype(np.int32)
        return Outcome(tokens=self.device.tokens(self.step.num_rows), counts=counts)


@dataclass
class Times:
    """When a request came, and when its tokens did."""

    came_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.tokens_s[0] - self.came_s

    @property
    def gaps_s(self) -> list[float]:
        return np.diff(self.tokens_s).tolist()


class Traffic:
    """An engine in simulated time, and its clients."""

    closed = False
    given: ClassVar[dict[str, float]] = {}
    """Limits that are being swept."""

    def __init__(self, *, num_pages: int = NUM_PAGES, **limits: object) -> None:
        shape = RunnerLimits(
            num_slots=256, num_pages=num_pages, page_size=PAGE, pages_per_slot=CONTEXT // PAGE, context_length=CONTEXT,
            max_step_tokens=16_384, vocab_size=1000,
        )  # fmt: skip
        given = {name: getattr(shape, name) for name in RunnerLimits.__struct_fields__}
        self.limits = Limits(**{**given, "max_running": 256, "chunk_tokens": 8192, **limits, **self.given})
        self.device = Device(shape)
        self.queues = Queues(self.limits, None)
        cache = PrefixCache(num_pages=num_pages, layout=self.limits.layout)
        self.loop = Loop(
            runner=self.device,
            queues=self.queues,
            cache=cache,
            limits=self.limits,
            inbox=self,
            outbox=self,
            clock=self.device,
        )
        self.times: dict[int, Times] = {}
        self.turn_us: list[float] = []
        """What turns of the loop with many waiting requests cost the host."""
        self._coming: list[tuple[float, Generate]] = []
        self._dice = np.random.default_rng(0)

    def ask(self, at_s: float, length: int, output: int, *, stream: bool = True, start: tuple[int, ...] = ()) -> int:
        """A request that comes at `at_s`; its prompt begins with `start`. Returns its id."""
        number = len(self.times) + 1
        prompt = [*start, *self._dice.integers(10, 1000, length - len(start)).tolist()]
        sampling = SamplingParams(max_new_tokens=output, ignore_eos=True, stop_token_ids=(STOP,))
        message = Generate(id=number, rid=str(number), prompt=pack_ids(prompt), sampling=sampling, stream=stream)
        self.times[number] = Times(at_s)
        self._coming.append((at_s, message))
        return number

    def drain(self, block_s: float) -> list[ToEngine]:
        if not self._busy and self._coming:
            self.device.now_s = max(self.device.now_s, min(at for at, _ in self._coming))
        due: list[ToEngine] = [message for at, message in self._coming if at <= self.device.now_s]
        self._coming = [each for each in self._coming if each[0] > self.device.now_s]
        return due

    @property
    def _busy(self) -> bool:
        queues = self.queues
        return bool(queues.running or queues.prefilling or len(queues.waiting) or queues.leaving)

    def send(self, message: ToDetokenizer) -> None:
        if isinstance(message, Tokens):
            for number, count in zip(message.ids, message.counts, strict=True):
                self.times[number].tokens_s += [self.device.now_s] * count

    def run(self) -> float:
        """Until all requests have ended. Returns the time of the last token, in seconds."""
        while self._coming or self._busy:
            before = time.process_time()
            self.loop.turn()
            if len(self.queues.waiting) >= _MANY:
                self.turn_us.append(1e6 * (time.process_time() - before))
        return max(each.tokens_s[-1] for each in self.times.values() if each.tokens_s)


@contextmanager
def changed(module: ModuleType | None, name: str, value: float) -> Iterator[None]:
    """A constant of `module`, or one of `Limits`, with another value."""
    if module is None:
        Traffic.given = {name: value}
        try:
            yield
        finally:
            Traffic.given = {}
        return
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def mean(values: list[float]) -> float:
    return float(np.mean(values))


def burst() -> dict[str, float]:
    """16 streams decode; then 64 prompts of 1,024 tokens come at once."""
    traffic = Traffic()
    streams = [traffic.ask(0.0, 64, 600) for _ in range(16)]
    crowd = [traffic.ask(1.0, 1024, 64) for _ in range(64)]
    traffic.run()
    gaps = [gap for each in streams for gap in traffic.times[each].gaps_s]
    return {
        "mean first token of the crowd, s": mean([traffic.times[each].first_s for each in crowd]),
        "longest gap of the streams, s": max(gaps),
        "last token of the crowd, s": max(traffic.times[each].tokens_s[-1] for each in crowd) - 1.0,
    }


def one_long() -> dict[str, float]:
    """8 streams decode beside a prompt of 60,000 tokens; a short prompt comes each half second."""
    traffic = Traffic()
    streams = [traffic.ask(0.0, 64, 1500) for _ in range(8)]
    long = traffic.ask(1.0, 60_000, 16)
    short = [traffic.ask(1.2 + 0.5 * at, 200, 8) for at in range(6)]
    traffic.run()
    ends_s = traffic.times[long].tokens_s[0]
    beside = [
        gap
        for each in streams
        for at, gap in zip(traffic.times[each].tokens_s[1:], traffic.times[each].gaps_s, strict=True)
        if 1.0 < at < ends_s
    ]
    return {
        "mean gap of the streams, in decode steps": 1000 * mean(beside) / STEP_MS,
        "longest gap, in decode steps": 1000 * max(beside) / STEP_MS,
        "first token of the long prompt, s": traffic.times[long].first_s,
        "mean first token of short prompts, s": mean([traffic.times[each].first_s for each in short]),
    }


def batch() -> dict[str, float]:
    """512 requests of 32 to 2,048 prompt tokens and 16 to 256 output tokens at once, none of them streamed."""
    traffic = Traffic(unwatched_tokens=16_384)
    dice = np.random.default_rng(1)
    for _ in range(512):
        traffic.ask(0.0, int(dice.integers(32, 2048)), int(dice.integers(16, 256)), stream=False)
    return {"last token, s": traffic.run()}


def mixed() -> dict[str, float]:
    """Prompts of 20,000 tokens every 0.6 s, of 200 tokens every 0.05 s, streamed."""
    traffic = Traffic()
    short = [traffic.ask(0.05 * at, 200, 32) for at in range(200)]
    long = [traffic.ask(0.6 * at, 20_000, 32) for at in range(16)]
    traffic.run()
    first = [traffic.times[each].first_s for each in short]
    return {
        "mean first token, short, s": mean(first),
        "99th percentile, short, s": float(np.percentile(first, 99)),
        "mean first token, long, s": mean([traffic.times[each].first_s for each in long]),
    }


def favoured() -> dict[str, float]:
    """120 requests a second find 1,500 of their 1,600 tokens cached, longest prefix first, 16 run; one finds nothing."""
    traffic = Traffic(policy="lpm", max_running=16)
    start = tuple(np.random.default_rng(2).integers(10, 1000, 1500).tolist())
    many = [traffic.ask(at / 120, 1600, 64, start=start) for at in range(600)]
    lone = traffic.ask(0.5, 1600, 64)
    traffic.run()
    return {
        "first token of the one, s": traffic.times[lone].first_s,
        "mean first token of the others, s": mean([traffic.times[each].first_s for each in many]),
    }


def following() -> dict[str, float]:
    """8 streams, a prompt of 60,000 tokens, 4 prompts that begin with its first 20,000 tokens, and 40 short ones."""
    traffic = Traffic()
    for _ in range(8):
        traffic.ask(0.0, 64, 1500)
    start = tuple(np.random.default_rng(3).integers(10, 1000, 20_000).tolist())
    traffic.ask(1.0, 60_000, 16, start=start)
    followers = [traffic.ask(1.1, 20_100, 16, start=start) for _ in range(4)]
    for at in range(40):
        traffic.ask(1.1 + 0.03 * at, 200, 8)
    traffic.run()
    return {
        "mean first token of the four, s": mean([traffic.times[each].first_s for each in followers]),
        "last token of all, s": max(each.tokens_s[-1] for each in traffic.times.values()),
    }


def queue() -> dict[str, float]:
    """2,000 requests wait for the prefix that a long prompt computes: what a turn of the loop costs the host."""
    traffic = Traffic()
    start = tuple(np.random.default_rng(4).integers(10, 1000, 20_000).tolist())
    for _ in range(8):
        traffic.ask(0.0, 64, 200)
    traffic.ask(0.2, 40_000, 2, start=start)
    for _ in range(2000):
        traffic.ask(0.3, 1600, 2, start=start[:1500])
    traffic.run()
    return {"median turn while they wait, us": float(np.median(traffic.turn_us))}


def crowded() -> dict[str, float]:
    """400 requests of 200 to 1,000 prompt tokens within 20 s that may say 8,192 tokens, in a pool of 80,000 tokens. Those of
    the first 5 s say 100 tokens on average, later ones 1,000."""
    traffic = Traffic(num_pages=5000)
    traffic.device.stop_chances = ((0.0, 1 / 100), (5.0, 1 / 1000))
    dice = np.random.default_rng(6)
    lengths = [int(dice.integers(200, 1000)) for _ in range(400)]
    for at, length in enumerate(lengths):
        traffic.ask(0.05 * at, length, 8192, stream=False)
    last_s = traffic.run()
    counters = traffic.queues.counters
    return {
        "last token, s": last_s,
        "tokens per second": counters.output_tokens / last_s,
        "retractions": counters.retractions,
        "prompt tokens computed again": counters.prompt_tokens - sum(lengths),
    }


def alike() -> dict[str, float]:
    """256 requests of 400 tokens at once; 32 each begin with the same 100 tokens, which are not cached."""
    traffic = Traffic()
    dice = np.random.default_rng(7)
    starts = [tuple(dice.integers(10, 1000, 100).tolist()) for _ in range(8)]
    asked = [traffic.ask(0.0, 400, 32, start=starts[at % 8]) for at in range(256)]
    last_s = traffic.run()
    return {
        "mean first token, s": mean([traffic.times[each].first_s for each in asked]),
        "last token, s": last_s,
        "prompt tokens computed": traffic.queues.counters.prompt_tokens,
    }


def families() -> dict[str, float]:
    """1,200 requests within a second, each beginning with one of 60 prefixes of 1,200 tokens, in a pool that holds 25 of
    them. Policy `auto`, 24 requests at once."""
    traffic = Traffic(policy="auto", max_running=24, num_pages=2400)
    dice = np.random.default_rng(8)
    starts = [tuple(dice.integers(10, 1000, 1200).tolist()) for _ in range(60)]
    asked = [traffic.ask(at / 1200, 1300, 16, start=starts[int(dice.integers(60))]) for at in range(1200)]
    last_s = traffic.run()
    counters = traffic.queues.counters
    return {
        "last token, s": last_s,
        "mean first token, s": mean([traffic.times[each].first_s for each in asked]),
        "share of cached tokens": counters.cached_tokens / (counters.cached_tokens + counters.prompt_tokens),
        "turns while they wait, us, median": float(np.median(traffic.turn_us or [0.0])),
        "95th percentile": float(np.percentile(traffic.turn_us or [0.0], 95)),
    }


def stumbling() -> dict[str, float]:
    """16 streams, prompts of 2,000 tokens every 0.2 s, and one step in 40 takes 20 times as long as it should."""
    traffic = Traffic()
    traffic.device.slow_every = 40
    streams = [traffic.ask(0.0, 64, 800) for _ in range(16)]
    prompts = [traffic.ask(0.5 + 0.2 * at, 2000, 16) for at in range(40)]
    traffic.run()
    gaps = [gap for each in streams for gap in traffic.times[each].gaps_s]
    return {
        "mean first token of prompts, s": mean([traffic.times[each].first_s for each in prompts]),
        "95th percentile of the streams' gaps, s": float(np.percentile(gaps, 95)),
    }


def short_of_memory() -> dict[str, float]:
    """40 prompts of 500 tokens at once every 0.7 s, none streamed, on a device that fails in steps of more than 3,000."""
    traffic = Traffic()
    traffic.device.most_tokens = 3000
    for at in range(2000):
        traffic.ask(0.7 * (at // 40), 500, 8, stream=False)
    last_s = traffic.run()
    failed = traffic.queues.counters.failed
    return {"last token, s": last_s, "failed steps": traffic.queues.counters.oom_steps, "failed requests": failed}


def half_pages() -> dict[str, float]:
    """400 requests of 300 tokens, each of which goes on from an earlier one whose 150 to 165 tokens end inside a page."""
    traffic = Traffic()
    dice = np.random.default_rng(9)
    starts = [tuple(dice.integers(10, 1000, int(dice.integers(150, 166))).tolist()) for _ in range(400)]
    for at, start in enumerate(starts):
        traffic.ask(0.01 * at, len(start) + 32, 4, start=start)
    asked = [traffic.ask(6.0 + 0.01 * at, 300, 4, start=start) for at, start in enumerate(starts)]
    traffic.run()
    return {
        "mean first token, ms": 1000 * mean([traffic.times[each].first_s for each in asked]),
        "prompt tokens computed": traffic.queues.counters.prompt_tokens,
    }


Scenario = Callable[[], dict[str, float]]
SWEEPS: dict[str, tuple[ModuleType | None, Scenario, tuple[float, ...]]] = {
    "_CROWD": (plan, burst, (1, 4, 8, 16, 64, 1000)),
    "_CROWD_RATIO": (plan, burst, (0, 1, 4, 16)),
    "_BESIDE_SLOW": (plan, one_long, (1.1, 1.4, 1.7, 2.0, 3.0)),
    "_MOST_OWED": (plan, one_long, (1, 8, 32, 128)),
    "_UNWATCHED": (plan, batch, (1.0, 2.0, 8.0, 32.0)),
    "_SLOW_MS": (prefill, mixed, (100.0, 300.0, 1000.0, 10_000.0)),
    "_SPARE": (prefill, batch, (2, 4, 8, 16, 1000)),
    "_PEEK": (prefill, batch, (0, 8, 32, 256)),
    "PATIENCE_STEPS": (policy, favoured, (1, 4, 16, 64, 1000)),
    "PATIENCE_TO_FOLLOW": (prefill, following, (0, 8, 32, 1000)),
    "LOOK_AHEAD": (prefill, queue, (16, 64, 256, 2000)),
    "_AUTO_HIT_RATE": (policy, families, (0.0, 0.1, 0.5, 2.0)),
    "_MIN_EXPECTED": (estimate, crowded, (0, 16, 64, 256)),
    "_WINDOW": (learn, stumbling, (1, 5, 15, 61)),
    "_CAP_HELD_STEPS": (queueing, short_of_memory, (4, 16, 64, 256)),
    "_WORTH_A_COPY": (radix, half_pages, (1, 2, 4, 16)),
    "small_share": (None, mixed, (0.0, 0.1, 0.25, 0.5)),
    "min_chunk_tokens": (None, one_long, (16, 64, 256, 1024)),
    "large_step_tokens": (None, batch, (512, 2048, 4096, 8192, 1_000_000)),
    "chunk_tokens": (None, mixed, (1024, 2048, 4096, 8192, 16_384)),
    "share_tokens": (None, alike, (1, 32, 128, 1000)),
    "lpm_window": (None, families, (8, 32, 128, 256, 512, 2048)),
    "conservativeness": (None, crowded, (0.5, 0.8, 1.0, 1.3, 2.0)),
    "estimate_clip_tokens": (None, crowded, (512, 2048, 4096, 8192)),
    "max_retractions": (None, crowded, (1, 2, 4, 16)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"constants (default: all of {', '.join(SWEEPS)})")
    logging.disable()  # of steps that fail on purpose
    for name in parser.parse_args().names or SWEEPS:
        module, scenario, values = SWEEPS[name]
        print(f"\n{name}: {scenario.__doc__}")
        for value in values:
            with changed(module, name, value):
                found = scenario()
            print(f"  {value:>7g}   " + ",  ".join(f"{key}: {number:.3f}" for key, number in found.items()), flush=True)


if __name__ == "__main__":
    main()
