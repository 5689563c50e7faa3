"""How many drafts the device is asked for: those that pay, whatever steps take and however often drafts are right."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bough.core.step import FIRST_DRAFT, NO_PROPOSER
from bough.speculative.device import DeviceDrafter
from bough.speculative.rates import PlaceRates

SLOTS = 64


def job(may_draft: bool = True) -> Any:
    return SimpleNamespace(may_draft=may_draft)


def queues(proposed: int) -> Any:
    return SimpleNamespace(slots=SimpleNamespace(num_proposed=np.full(SLOTS, proposed, np.int32)))


class Device:
    """Rows that decode, with drafts that are right at given rates, in steps that take a given time."""

    def __init__(
        self, rates: list[float], step_ms: float, draft_ms: float, upkeep_ms: float = 0.0, **options: Any
    ) -> None:
        self.rates = rates
        self.step_ms, self.draft_ms, self.upkeep_ms = step_ms, draft_ms, upkeep_ms
        self.drafter = DeviceDrafter(len(rates), SLOTS, adaptive=True, reach=lambda count: count, **options)
        self.rng = random.Random(1)
        self.left = 0
        self.tokens = 0
        self.ms = 0.0
        self.chosen: list[int] = []

    def run(self, steps: int, num_rows: int) -> float:
        """Tokens a millisecond of these steps."""
        drafter, slots = self.drafter, np.arange(num_rows)
        for slot in range(num_rows):
            drafter.begin(slot, job())
        before = self.tokens, self.ms
        for _ in range(steps):
            proposals = drafter.proposals(num_rows, prompts=False)
            most = np.full(num_rows, 99, np.int32)
            offer = drafter.offer(queues(self.left), slots, most, 10_000)
            drafts = np.zeros(num_rows, np.int32) if offer is None else offer.counts
            accepted = np.array([self._right(int(count)) for count in drafts], np.int32)
            ms = self.step_ms + self.draft_ms * num_rows * int(drafts[0]) + self.draft_ms * max(proposals, 0)
            ms = (ms + (self.upkeep_ms if proposals >= 0 else 0.0)) * self.rng.uniform(0.97, 1.03)
            drafter.learn(queues(0), slots, drafts, accepted)
            drafter.timed(num_rows, num_rows + int(drafts.sum()), ms, proposals)
            self.tokens += num_rows + int(accepted.sum())
            self.ms += ms
            self.left = max(proposals, 0)
            self.chosen.append(proposals)
        return (self.tokens - before[0]) / (self.ms - before[1])

    def _right(self, count: int) -> int:
        for place in range(count):
            if self.rng.random() > self.rates[place]:
                return place
        return count


@pytest.mark.parametrize(("rate", "draft_ms", "expected"), [(0.9, 0.01, 4), (0.05, 0.2, NO_PROPOSER), (0.6, 0.2, 1)])
def test_it_finds_the_number_that_pays(rate: float, draft_ms: float, expected: int) -> None:
    device = Device([rate] * 4, 1.0, draft_ms)
    device.run(1500, 1)
    assert max(set(device.chosen[-300:]), key=device.chosen[-300:].count) == expected


@pytest.mark.parametrize(("upkeep", "num_rows"), [(0.0, 1), (0.0, 32), (0.25, 4)])
def test_useless_drafts_cost_little(upkeep: float, num_rows: int) -> None:
    device = Device([0.02] * 4, 1.0, 0.1, upkeep, upkeep=upkeep)
    rate = device.run(6000, num_rows)
    assert rate > 0.95 * num_rows


def test_good_drafts_are_made_again_when_the_batch_shrinks() -> None:
    """Drafts that cost too much among many rows are worth it for a few, also once the proposer has stopped."""
    device = Device([0.85] * 3, 1.0, 0.1, 0.1, upkeep=0.1)
    device.run(3000, 64)
    assert NO_PROPOSER in device.chosen
    device.run(20, 2)
    device.chosen.clear()
    assert device.run(600, 2) > 1.3 * 2
    assert device.chosen[-1] > 0


def test_rows_that_were_not_followed_get_no_drafts() -> None:
    drafter = DeviceDrafter(3, SLOTS, adaptive=False, reach=lambda count: count)
    drafter.begin(0, job())
    drafter.begin(1, job(may_draft=False))
    drafter.begin(2, job())
    offer = drafter.offer(queues(3), np.array([0, 1, 2]), np.array([9, 9, 2], np.int32), 100)
    assert offer is not None
    assert offer.counts.tolist() == [3, 0, 2]
    assert offer.tokens.tolist() == [FIRST_DRAFT, FIRST_DRAFT - 1, FIRST_DRAFT - 2, FIRST_DRAFT, FIRST_DRAFT - 1]
    assert drafter.offer(queues(0), np.array([0]), np.array([9], np.int32), 100) is None
    few = drafter.offer(queues(3), np.array([0, 2]), np.array([9, 9], np.int32), 5)
    assert few is not None
    assert few.counts.tolist() == [2, 2]


def test_rates_are_those_of_each_place() -> None:
    rates = PlaceRates(3)
    rng = np.random.default_rng(0)
    for _ in range(4000):
        accepted = np.minimum(rng.geometric(0.4, 8) - 1, 3).astype(np.int32)
        rates.observe(8, np.full(8, 3, np.int32), accepted)
    expected = 1 + np.cumsum(0.6 ** np.arange(1, 4))
    assert np.allclose(rates.expected(8)[1:], expected, rtol=0.05)


def asked(drafter: DeviceDrafter, slots: int = 1) -> Any:
    return drafter.offer(queues(3), np.arange(slots), np.full(slots, 9, np.int32), 100)


PLAIN, ONE, THREE = NO_PROPOSER, 1, 3
"""As `Step.proposals`."""


@pytest.mark.parametrize(
    ("times", "rests", "first"),
    [
        ({PLAIN: 10.0, ONE: 19.0, THREE: 30.0}, True, PLAIN),  # 0.8 more tokens would take 0.9 more time
        ({PLAIN: 10.0, ONE: 11.0, THREE: 13.0}, False, 3),
        ({PLAIN: 10.0, ONE: 12.0, THREE: 40.0}, False, 1),
    ],
)
def test_what_steps_take_may_be_known_beforehand(times: dict[int, float], rests: bool, first: int) -> None:
    drafter = DeviceDrafter(3, SLOTS, adaptive=True, reach=lambda count: count)
    drafter.expect({proposals: [ms] * 4 for proposals, ms in times.items()})
    assert drafter.is_resting == rests
    drafter.begin(0, job())
    assert drafter.proposals(1, prompts=False) == first
    assert (asked(drafter) is None) == rests


def test_what_can_not_pay_is_not_tried_beside_more_rows_either() -> None:
    device = Device([0.9] * 3, 10.0, 9.0)
    device.drafter.expect({PLAIN: [10.0] * 4, ONE: [28.0] * 4, THREE: [64.0] * 4})
    assert device.run(1200, 1) == pytest.approx(0.1, rel=0.02)
    assert device.run(1200, 6) == pytest.approx(0.6, rel=0.02)
    assert set(device.chosen) == {NO_PROPOSER}


def test_a_drafter_that_always_drafts_does_not_begin_with_a_rest() -> None:
    drafter = DeviceDrafter(3, SLOTS, adaptive=False, reach=lambda count: count)
    drafter.expect({PLAIN: [1.0] * 4, ONE: [9.0] * 4, THREE: [9.0] * 4})
    assert not drafter.is_resting


def test_verifying_costs_something_where_the_proposer_does_not_run() -> None:
    """The step behind one with drafts may have no proposer, and still verifies them."""
    lost = []
    for num_tokens, ms in ((1, 10.0), (4, 15.0)):
        drafter = DeviceDrafter(3, SLOTS, adaptive=True, reach=lambda count: count)
        drafter.expect({PLAIN: [10.0] * 4, ONE: [11.0] * 4, THREE: [13.0] * 4})
        before = drafter.budget.left
        drafter.learn(queues(0), np.arange(1), np.full(1, num_tokens - 1, np.int32), np.zeros(1, np.int32))
        drafter.timed(1, num_tokens, ms, NO_PROPOSER)
        lost.append(before - drafter.budget.left)
    assert lost[0] < 0
    assert lost[1] == pytest.approx(0.5, abs=0.02)


def test_rows_that_were_there_while_it_rested_are_left_alone() -> None:
    drafter = DeviceDrafter(3, SLOTS, adaptive=True, reach=lambda count: count)
    drafter.begin(0, job())
    drafter.expect({PLAIN: [10.0] * 4, ONE: [40.0] * 4, THREE: [60.0] * 4})
    drafter.begin(1, job())
    drafter.is_resting = False
    drafter.begin(2, job())
    offer = asked(drafter, 3)
    assert offer is not None
    assert offer.counts.tolist()[:2] == [0, 0]
    assert offer.counts[2] > 0
