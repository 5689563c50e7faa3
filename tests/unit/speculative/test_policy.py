"""How many drafts are verified: by how often they are right and by what steps take."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bough.speculative.acceptance import Acceptance
from bough.speculative.budget import LossBudget
from bough.speculative.choose import choose
from bough.speculative.costs import StepPace, StepTimes, VerifyCosts


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_makes_the_most_tokens_a_millisecond(seed: int):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 4))
    survival = [np.multiply.accumulate(rng.random(int(rng.integers(0, 4)))) for _ in range(rows)]
    per_token, fixed = rng.random() * 0.5, rng.random() + 0.2

    def cost(count: int) -> float:
        return fixed + per_token * (rows + count)

    def rate(counts: tuple[int, ...]) -> float:
        return (rows + sum(each[:n].sum() for each, n in zip(survival, counts, strict=True))) / cost(sum(counts))

    best = max(product(*(range(len(each) + 1) for each in survival)), key=rate)
    chosen = tuple(choose(survival, 100, cost).tolist())
    plain = (0,) * rows
    assert rate(chosen) == pytest.approx(rate(best)) or (chosen == plain and rate(best) < 1.031 * rate(plain))
    assert choose(survival, 2, cost).sum() <= 2


def test_rates_follow_what_was_right_and_rows_their_own_record():
    rates = Acceptance(2, 4, np.array([0.5, 0.8]), num_slots=3)
    assert rates.rates(1, 0, 4).tolist() == pytest.approx([0.8] * 4)
    for _ in range(200):
        rates.observe(0, 0, 2, 4)
    table = rates.table()
    assert table[0, :2].min() > 0.97
    assert table[0, 2] < 0.03
    assert table[0, 3] == pytest.approx(table[0, 2]), "never reached: as the place before it"
    assert table[1].tolist() == pytest.approx([0.8] * 4)
    for _ in range(10):
        rates.observe(1, 1, 0, 4)
    assert rates.rates(1, 1, 1)[0] < 0.5 * rates.rates(1, 2, 1)[0]
    rates.begin(1)
    assert rates.rates(1, 1, 1)[0] == rates.rates(1, 2, 1)[0]


def test_costs_are_measured_or_put_between_those_that_were():
    costs = VerifyCosts()
    costs.slope = 0.25
    assert costs.of(1, 5, serial=True) == pytest.approx(2.0), "in units of a plain step"
    for ms in (10.0, 10.0, 500.0):
        costs.add(1, 1, ms, serial=True)
    assert costs.of(1, 1, serial=True) == 10.0
    assert costs.of(1, 5, serial=True) == pytest.approx(20.0)
    costs.add(1, 9, 14.0, serial=True)
    assert costs.of(1, 5, serial=True) == pytest.approx(12.0)
    assert costs.of(1, 10, serial=True) == pytest.approx(16.5)
    assert costs.of(1, 5, serial=False) == pytest.approx(12.0), "until it is measured"
    costs.add(1, 1, 4.0, serial=False)
    assert costs.of(1, 1, serial=False) == 4.0
    assert costs.of(64, 64, serial=True) == 1.0
    assert costs.most_tokens(1) == 2 + 2 * 9


def test_one_slow_step_does_not_count_and_few_steps_leave_doubts():
    times = StepTimes(StepPace())
    for ms in (10.0, 10.2, 9.8, 500.0, 10.0, 10.2, 9.8, 10.0):
        times.add(1, ms)
    assert times.of(1) == pytest.approx(10.0, rel=0.1)
    few, many = StepTimes(StepPace()), StepTimes(StepPace())
    rng = np.random.default_rng(0)
    for count, each in ((4, few), (60, many)):
        for ms in rng.uniform(7.0, 13.0, count):
            each.add(0, ms)
    assert few.at_least(0) / few.of(0) < many.at_least(0) / many.of(0) < 1.0  # type: ignore[operator]


def test_a_machine_that_slows_down_slows_all_kinds():
    """What steps with drafts take beside plain ones stays known, though plain ones have not run since."""
    times = StepTimes(StepPace())
    for _ in range(30):
        times.add(1, 10.0)
        times.add(4, 15.0)
    for _ in range(30):
        times.add(4, 15.0 * 1.3)
    assert times.of(1) == pytest.approx(13.0, rel=0.12)


def test_a_budget_is_spent_once_and_filled_by_time():
    budget = LossBudget(0.01, first=2.0, most=4.0, debt=1.0, again=0.5)
    budget.lose(1.5)
    assert not budget.is_spent
    budget.lose(0.6)
    assert budget.is_spent
    budget.pass_time(50.0)
    assert budget.is_spent, "0.4 are there"
    budget.pass_time(20.0)
    assert not budget.is_spent
    budget.lose(-100.0)
    assert budget.left == 4.0, "gains are kept up to a bound"
    budget.lose(100.0)
    assert budget.left == -1.0, "and so are losses"
