"""One user's very long prompt and the others' tokens, on a device whose steps take the time that their tokens cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from bough.core.step import Step
from tests.covers import long
from tests.sim.harness import VOCAB, Client, Sim

USERS = 8


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a decode step, of a prompt's token, of its look at one KV token, of reading one for a whole chunk."""

    decode: float
    token: float
    look: float
    read: float

    def alone_s(self, length: int) -> float:
        """Of a prompt by itself, in chunks so large that reading costs nothing."""
        return (length * self.token + self.look * length**2 / 2) / 1e3


FLAT = Cost(8.0, 0.04, 4e-7, 0.0)
"""A model whose tokens cost much more than their looks."""
STEEP = Cost(5.3, 0.02, 1.1e-6, 3.1e-5)
"""Eight billion parameters on one large GPU, as measured: at the end of the prompt a token costs seven times what it did at
its beginning, and a chunk's part of a step is nearly over once the prompt's KV is read."""


class Device:
    """Makes the simulation's clock run by the steps' cost, and notes when each user's tokens came."""

    def __init__(self, long_prompt: int, cost: Cost = FLAT, **settings: object) -> None:
        self.sim = Sim(
            context_length=long_prompt + 1024, page_size=64, num_pages=long_prompt // 64 + 600, max_step_tokens=8192,
            min_chunk_tokens=64, fail_wait=self._cost, **settings,
        )  # fmt: skip
        self.cost = cost
        self.times: dict[int, list[float]] = {}

    def _cost(self, step: Step) -> None:
        prefill = step.num_query[step.num_decodes :].astype(np.int64)
        context = step.context[step.num_decodes :].astype(np.int64)
        looks, cost = int((prefill * (context + prefill)).sum()), self.cost
        took = cost.decode + cost.token * int(prefill.sum()) + cost.look * looks + cost.read * int(context.sum())
        self.sim.clock.now += took / 1e3

    def turn(self) -> None:
        before = {number: len(client.tokens) for number, client in self.sim.clients.items()}
        self.sim.loop.turn()
        for number, client in self.sim.clients.items():
            self.times.setdefault(number, []).extend(
                [self.sim.clock.now] * (len(client.tokens) - before.get(number, 0))
            )

    def ask(self, length: int, tokens: int) -> Client:
        rng = np.random.default_rng(len(self.sim.clients))
        return self.sim.ask(rng.integers(0, VOCAB, length).tolist(), max_new=tokens)

    def tpot_ms(self, client: Client) -> float:
        times = self.times[client.ask.id]
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1)

    def gaps_ms(self, client: Client) -> list[float]:
        return (1e3 * np.diff(self.times[client.ask.id])).tolist()


def users(device: Device, tokens: int) -> list[Client]:
    asked = [device.ask(100, tokens) for _ in range(USERS)]
    while not all(client.tokens for client in asked):
        device.turn()
    return asked


def some_prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCAB, length).tolist()


def begin_long_prompt(device: Device, length: int, *, turns: int) -> None:
    """Beside streams; so many turns of it."""
    users(device, 5000)
    for _ in range(40):
        device.turn()
    device.ask(length, 4)
    for _ in range(turns):
        device.turn()


def first_token_s(device: Device, prompt: list[int]) -> float:
    began, asked = device.sim.clock.now, device.sim.ask(prompt, max_new=2)
    for _ in range(20_000):
        device.turn()
        if asked.tokens:
            break
    assert asked.tokens
    return device.sim.clock.now - began


@pytest.mark.timeout(900)  # a minute for the long ones, on a machine that does nothing else
@pytest.mark.parametrize(("length", "depth"), [(65_536, 1), long(131_072, 1), long(131_072, 0)])
@pytest.mark.parametrize(("cost", "most_often", "longer"), [(FLAT, 2.2, 4), (STEEP, 4.5, 5)], ids=["flat", "steep"])
def test_others_hardly_notice_a_very_long_prompt(
    cost: Cost, most_often: float, longer: float, length: int, depth: int
) -> None:
    tokens = length // 655  # of the others' answers: as many of them come and go beside a shorter prompt
    device = Device(length, cost, depth=depth, num_slots=16)
    warm = users(device, 60)
    while not all(client.ends for client in warm):
        device.turn()
    idle = np.percentile([device.tpot_ms(client) for client in warm], 99)
    watching = users(device, tokens)
    slow = device.ask(length, 4)
    began = device.sim.clock.now
    beside: list[Client] = []
    while not slow.ends:
        device.turn()
        if not device.sim.queues.running or (len(beside) < 40 and all(client.ends for client in (*watching, *beside))):
            beside += users(device, tokens)
    took = device.sim.clock.now - began
    busy = [client for client in (*watching, *beside) if client.ends]
    assert len(busy) >= 3 * USERS, "others came and went while it was computed"
    tpot = np.percentile([device.tpot_ms(client) for client in busy], 99)
    assert tpot <= 2 * idle, f"{tpot:.1f} ms beside it, {idle:.1f} ms without"
    gaps = [gap for client in busy for gap in device.gaps_ms(client)]
    often = np.percentile(gaps, 95)
    assert often <= most_often * idle, f"{often:.1f} ms between tokens, {idle:.1f} ms without"
    alone = cost.alone_s(length)
    assert took <= longer * alone, f"it took {took:.1f} s instead of {alone:.1f}"
    assert not device.sim.runner.violations


@pytest.mark.parametrize("cost", [FLAT, STEEP], ids=["flat", "steep"])
def test_a_short_prompt_beside_it_is_answered_within_a_second(cost: Cost) -> None:
    device = Device(131_072, cost, num_slots=16)
    begin_long_prompt(device, 131_072, turns=50)
    assert first_token_s(device, some_prompt(250)) <= 1.0


BY_TURNS = Cost(8.0, 0.2, 0.0, 0.0)
"""A slow device: a long prompt's part of a step is less than a chunk."""


def beside_a_long_prompt(cached: int) -> tuple[Device, list[int]]:
    """A device at work on a prompt of 60,000 tokens beside streams, and `cached` tokens that its tree knows."""
    device = Device(100_000, BY_TURNS, num_slots=32)
    known = some_prompt(cached)
    before = device.sim.ask(known, max_new=2)
    while not before.ends:
        device.turn()
    begin_long_prompt(device, 60_000, turns=100)
    return device, known


def test_what_is_nearly_all_cached_is_no_long_prompt() -> None:
    device, known = beside_a_long_prompt(cached=30_000)
    assert first_token_s(device, [*known, *[1] * 50]) <= 0.5


def test_long_prompts_take_turns() -> None:
    device, _ = beside_a_long_prompt(cached=64)
    alone = 6000 * BY_TURNS.token / 1e3
    share = 2 * 2.5  # of two long prompts, beside streams
    assert first_token_s(device, some_prompt(6000)) <= 1.5 * share * alone


def test_one_step_that_took_long_makes_no_short_prompt_a_long_one() -> None:
    """Say, because a kernel was built in it."""
    device = Device(8000, FLAT, num_slots=32)
    device.ask(100, 5000)
    device.turn()
    device.sim.clock.now += 20.0
    for _ in range(30):
        device.turn()
    assert device.sim.queues.cost.prefill_token_ms > 100, "that is what was learned"
    assert first_token_s(device, some_prompt(300)) <= 1.0


@pytest.mark.parametrize("turns", [7, *map(long, (6, 8, 9))])
def test_an_urgent_long_prompt_gets_the_place_that_was_made_for_it(turns: int) -> None:
    sim = Sim(
        context_length=2000, num_pages=4000, num_slots=4, max_step_tokens=256, min_chunk_tokens=8, priority=True,
        preempt_gap=10,
    )  # fmt: skip
    cost, rng = sim.queues.cost, np.random.default_rng(1)
    for _ in range(20):
        cost.observe(10.0, 0)
        cost.observe(10.0 + 64 * 1.5, 64)
    cost.observe = lambda ms, tokens: None  # type: ignore[method-assign]
    for _ in range(3):
        sim.ask(rng.integers(0, VOCAB, 20).tolist(), max_new=400)
    for _ in range(4):
        sim.turn()
    sim.ask(rng.integers(0, VOCAB, 1500).tolist(), max_new=2, priority=15)
    for _ in range(turns):
        sim.turn()
    urgent = sim.ask(rng.integers(0, VOCAB, 1200).tolist(), max_new=2, priority=20)
    for _ in range(4):
        sim.turn()
    assert urgent.ask.id in {row.job.id for row in sim.queues.prefilling.values()}
    sim.run()
