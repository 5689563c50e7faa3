"""Small parts of the scheduler: gates, what is learned, mail, limits, and the cost of a step on the host."""

from __future__ import annotations

import numpy as np
import pytest

from bough.bench.host import measure
from bough.config.concerns import SchedulerConfig
from bough.core.messages import Began, RowOutput, Tokens, unpack_ids
from bough.core.step import RunnerLimits
from bough.scheduler.constrain import Gate, allow_only
from bough.scheduler.learn import HitRate, OutputRatio, StepCost
from bough.scheduler.limits import Limits
from bough.scheduler.mail import Mail


class _Any:
    """A matcher that allows everything and remembers."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def accept(self, token: int) -> bool:
        self.taken.append(token)
        return token < 100

    def fill_mask(self, out: np.ndarray) -> None:
        out[:] = 5

    def is_terminated(self) -> bool:
        return len(self.taken) >= 3

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def forced(self) -> list[int]:
        return []


def _bits(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("token", [0, 1, 31, 32, 63, 77])
def test_allow_only(token: int) -> None:
    mask = np.full(3, -1, np.int32)
    allow_only(mask, token)
    assert _bits(mask) == [token]


def test_gate_waits_for_the_marker() -> None:
    matcher = _Any()
    gate = Gate(matcher, marker=(7, 8), after_reasoning=True)
    for token in (1, 7, 7):
        assert gate.accept(token)
        assert gate.thinking
    assert matcher.taken == []
    assert gate.accept(8)
    assert not gate.thinking
    gate.accept(3)
    assert matcher.taken == [3]
    gate.rollback(2)
    assert gate.thinking
    assert matcher.taken == []
    gate.accept(8)
    assert not gate.thinking


@pytest.mark.parametrize("end", [2, 31, 40])
def test_an_answer_with_a_grammar_cannot_end_within_its_reasoning(end: int) -> None:
    gate = Gate(_Any(), marker=(7, 8), after_reasoning=True, ends=(end, 8))
    mask = np.zeros(2, np.int32)
    gate.fill_mask(mask)
    assert _bits(mask) == [token for token in range(64) if token != end], "8 belongs to the marker"
    free = Gate(None, marker=(7, 8), budget=5, ends=(end,))
    free.fill_mask(mask)
    assert len(_bits(mask)) == 64


def test_gate_forces_the_rest_of_a_half_said_marker() -> None:
    gate = Gate(None, marker=(7, 8, 9), budget=2)
    assert not gate.may_constrain(1)
    assert gate.may_constrain(2)
    gate.accept(1)
    assert gate.forced() == []
    gate.accept(7)
    assert gate.forced() == [8, 9]
    mask = np.zeros(2, np.int32)
    gate.fill_mask(mask)
    assert _bits(mask) == [8]
    gate.accept(8)
    assert gate.forced() == [9]
    gate.accept(9)
    assert gate.forced() == []
    assert not gate.may_constrain(50)
    gate.fill_mask(mask)
    assert len(_bits(mask)) == 64


def test_a_marker_may_begin_in_the_prompt() -> None:
    matcher = _Any()
    gate = Gate(matcher, marker=(5, 7, 8, 9), before=(1, 2, 5, 7), after_reasoning=True, budget=0)
    assert gate.forced() == [8, 9]
    assert gate.accept(8)
    assert gate.thinking
    assert gate.accept(9)
    assert not gate.thinking
    gate.rollback(1)
    assert gate.thinking
    assert gate.forced() == [9]
    longer = Gate(matcher, marker=(5, 7, 8, 9), before=(5, 7), after_reasoning=True)
    for token in (8, 8, 9, 5, 7, 8):
        assert longer.accept(token)
        assert longer.thinking
    assert longer.accept(9)
    assert not longer.thinking
    assert matcher.taken == []


def test_gate_ends_with_its_grammar() -> None:
    gate = Gate(_Any())
    for token in (1, 2):
        gate.accept(token)
        assert not gate.terminated
    gate.accept(3)
    assert gate.terminated
    gate.rollback(1)
    assert not gate.terminated


def test_output_ratio_learns_and_reacts() -> None:
    ratio = OutputRatio(0.7)
    start = ratio.estimate(8, 1.0)
    for _ in range(200):
        ratio.observe(10, 100)
    assert ratio.mean == pytest.approx(0.1, abs=0.03)
    assert ratio.estimate(8, 1.0) < start / 3
    assert ratio.estimate(1, 1.0) >= ratio.estimate(100, 1.0)
    assert ratio.estimate(8, 2.0) == pytest.approx(2 * ratio.estimate(8, 1.0))
    before = ratio.mean
    ratio.retracted()
    assert ratio.mean > before


def test_step_cost_ignores_one_slow_step() -> None:
    cost = StepCost()
    assert cost.tokens_within(50.0) is None
    for _ in range(10):
        cost.observe(10.0, 0)
        cost.observe(30.0, 100)
    cost.observe(9000.0, 100)
    assert cost.prefill_token_ms == pytest.approx(0.2)
    assert cost.tokens_within(50.0) == pytest.approx(200, abs=1)
    assert cost.tokens_within(5.0) == 0
    assert cost.tokens_within(0.0) is None
    assert cost.tokens_within(None) == pytest.approx(200, abs=1)


def test_step_cost_is_that_of_large_steps() -> None:
    """Small steps cost what launching costs: a dozen of them say little about what a token of a large one takes."""
    cost = StepCost()
    cost.observe(5.0, 0)
    cost.observe(205.0, 8000)
    for _ in range(12):
        cost.observe(30.0, 128)
    assert cost.prefill_token_ms == pytest.approx(0.025)


def test_hit_rate() -> None:
    hits = HitRate()
    hits.observe(100, 50)
    hits.observe(300, 0)
    assert hits.overall == pytest.approx(0.125)
    assert 0 < hits.recent < 0.06


def test_mail_keeps_order_and_joins_rows() -> None:
    mail = Mail()
    mail.put(Began(id=1, rid="a"))
    mail.add(1, np.array([5], np.int32))
    first = mail.add_rows(np.array([2, 3]), np.array([1, 2], np.int32), np.array([6, 7, 8], np.int32))
    mail.say(first + 1, RowOutput(embedding=b"x"))
    mail.put(Began(id=4, rid="b"))
    mail.add(4)
    began, tokens, later, last = mail.take()
    assert isinstance(began, Began)
    assert isinstance(tokens, Tokens)
    assert (tokens.ids, tokens.counts, unpack_ids(tokens.tokens).tolist()) == ([1, 2, 3], [1, 1, 2], [5, 6, 7, 8])
    assert list(tokens.rows) == [2]
    assert isinstance(later, Began)
    assert isinstance(last, Tokens)
    assert last.counts == [0]
    assert mail.take() == []


def test_limits_follow_the_runner_and_the_wishes() -> None:
    runner = RunnerLimits(
        num_slots=64,
        num_pages=100,
        page_size=16,
        pages_per_slot=10,
        context_length=160,
        max_step_tokens=512,
        vocab_size=9,
    )
    auto = Limits.of(runner, SchedulerConfig())
    assert (auto.max_running, auto.chunk_tokens, auto.whole_prompts, auto.tpot_target_ms) == (64, 512, False, None)
    assert auto.capacity_tokens == 160
    wishes = SchedulerConfig(max_running_requests=8, chunked_prefill_size=-1, tpot_target_ms=30.0)
    chosen = Limits.of(runner, wishes, seed=3)
    assert (chosen.max_running, chosen.whole_prompts, chosen.tpot_target_ms, chosen.seed) == (8, True, 30.0, 3)


def test_a_step_of_many_rows_costs_little_more_than_one_of_few() -> None:
    """Columns, not objects: 64 times the rows must not cost anything like 64 times the work."""
    few = min(measure(8, 60)["step_us"] for _ in range(2))
    many = min(measure(512, 60)["step_us"] for _ in range(2))
    assert many < 10 * few
