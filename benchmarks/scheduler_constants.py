"""What the scheduler's constants do: one at a time is changed, and the same traffic is scheduled in simulated time.

    python benchmarks/scheduler_constants.py [NAME ...]

The scheduler, the prefix cache and the loop are the real ones; the device is a cost model of Llama 3.1 8B in bf16 on one
H200 (`STEP_MS`, `TOKEN_MS`, `TILE`). A simulated second is the same on every machine, so results can be compared between
commits. They say how one value compares with another, not how fast a server is. Results:
`docs/decisions/scheduler_constants.md`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from bough.cache.prefix import PrefixCache
from bough.core.messages import Generate, ToDetokenizer, ToEngine, Tokens, pack_ids
from bough.core.sampling import SamplingParams
from bough.core.step import Mask, Outcome, RunnerLimits, Step
from bough.engine.loop import Loop
from bough.scheduler import plan, policy, prefill
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Queues

STEP_MS = 5.2
"""A decode step: reading the weights."""
TOKEN_MS = 0.028
"""Each prompt token on top, in large steps."""
TILE = 512
"""Tokens by which the cost of large steps grows."""
PAGE = 16
NUM_PAGES = 30_000
CONTEXT = 65_536
_MANY = 1000


class Device:
    """Computes nothing, and takes its time on the simulation's clock."""

    def __init__(self, limits: RunnerLimits) -> None:
        self.limits = limits
        self.now_s = 0.0
        self._free_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def launch(self, step: Step) -> Launched:
        new = step.num_tokens - step.num_decode_tokens
        if new > 4 * TILE:
            new = -(-step.num_tokens // TILE) * TILE
        self._free_s = max(self.now_s, self._free_s) + (STEP_MS + TOKEN_MS * new) / 1000
        return Launched(self, step, self._free_s)

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
        return Outcome(tokens=np.full((self.step.num_rows, 1), 7, np.int32), counts=counts)


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

    def __init__(self, **limits: object) -> None:
        shape = RunnerLimits(
            num_slots=256, num_pages=NUM_PAGES, page_size=PAGE, pages_per_slot=CONTEXT // PAGE, context_length=CONTEXT,
            max_step_tokens=16_384, vocab_size=1000,
        )  # fmt: skip
        given = {name: getattr(shape, name) for name in RunnerLimits.__struct_fields__}
        self.limits = Limits(**{**given, "max_running": 256, "chunk_tokens": 8192, **limits})
        self.device = Device(shape)
        self.queues = Queues(self.limits, None)
        cache = PrefixCache(num_pages=NUM_PAGES, layout=self.limits.layout)
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
        sampling = SamplingParams(max_new_tokens=output, ignore_eos=True)
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
        return max(each.tokens_s[-1] for each in self.times.values())


@contextmanager
def changed(module: ModuleType, name: str, value: float) -> Iterator[None]:
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


Scenario = Callable[[], dict[str, float]]
SWEEPS: dict[str, tuple[ModuleType, Scenario, tuple[float, ...]]] = {
    "_CROWD": (plan, burst, (1, 4, 8, 16, 64, 1000)),
    "_CROWD_RATIO": (plan, burst, (0, 1, 4, 16)),
    "_BESIDE_LONG": (plan, one_long, (1.1, 1.4, 1.7, 2.0, 3.0)),
    "_MOST_OWED": (plan, one_long, (1, 8, 32, 128)),
    "_UNWATCHED": (plan, batch, (1.0, 2.0, 8.0, 32.0)),
    "_SLOW_MS": (prefill, mixed, (100.0, 300.0, 1000.0, 10_000.0)),
    "_SPARE": (prefill, batch, (2, 4, 8, 16, 1000)),
    "_PEEK": (prefill, batch, (0, 8, 32, 256)),
    "PATIENCE_STEPS": (policy, favoured, (1, 4, 16, 64, 1000)),
    "PATIENCE_TO_FOLLOW": (prefill, following, (0, 8, 32, 1000)),
    "LOOK_AHEAD": (prefill, queue, (16, 64, 256, 2000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"constants (default: all of {', '.join(SWEEPS)})")
    for name in parser.parse_args().names or SWEEPS:
        module, scenario, values = SWEEPS[name]
        print(f"\n{name}: {scenario.__doc__}")
        for value in values:
            with changed(module, name, value):
                found = scenario()
            print(f"  {value:>7g}   " + ",  ".join(f"{key}: {number:.3f}" for key, number in found.items()), flush=True)


if __name__ == "__main__":
    main()
