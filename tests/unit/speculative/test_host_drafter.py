"""The host's drafter inside an engine on the oracle: what it learns, when it drafts, and when it stops."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.step import I32
from bough.speculative.acceptance import F64
from bough.speculative.guesses import NO_GUESS, Guess
from bough.speculative.host import HostDrafter
from tests.sim.drafters import continuation
from tests.sim.harness import VOCAB, Sim, check_answer

PROMPT = [(7 * i + 3) % VOCAB for i in range(20)]


class Seer:
    """Guesses what the oracle says, right so often."""

    most = 4
    prior: F64 = np.array([0.5])

    def __init__(self, right: float) -> None:
        self.right = right
        self.guesses = 0
        self.texts: list[tuple[list[int], str]] = []

    def guess(self, text: I32, namespace: str) -> Guess:
        self.guesses += 1
        if self.right == 0.0 and len(text) % 3:
            return NO_GUESS
        return Guess(np.array(continuation(text.tolist(), self.most, self.right), np.int32), 0)

    def add(self, text: I32, num_prompt: int, namespace: str) -> None:
        self.texts.append((text.tolist(), namespace))


def run(
    right: float, *, depth: int, adaptive: bool = True, token_ms: float = 0.1, requests: int = 12
) -> tuple[Sim, HostDrafter]:
    """Steps take 1 ms and `token_ms` for each token."""
    drafter = HostDrafter(Seer(right), 8, overlaps=depth > 0, adaptive=adaptive, clock=lambda: 0.0)
    timed = drafter.timed
    drafter.timed = lambda rows, tokens, ms, left: timed(rows, tokens, 1.0 + token_ms * tokens, left)  # type: ignore[method-assign]
    sim = Sim(depth=depth, drafter=drafter, num_pages=200, context_length=200)
    for first in range(0, requests, 2):
        clients = [sim.ask([first + i, *PROMPT], max_new=40) for i in range(2)]
        sim.run()
        for client in clients:
            check_answer(sim, client)
    return sim, drafter


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_that_are_right_are_made_and_those_that_are_wrong_are_not(depth: int):
    sim, _ = run(0.95, depth=depth)
    counters = sim.queues.counters
    per_row = 1 + counters.accepted_tokens / counters.decoded_rows
    assert per_row > 2.0
    sim, _ = run(0.0, depth=depth)
    counters = sim.queues.counters
    assert counters.draft_tokens < 0.1 * counters.decoded_rows


def test_drafts_that_cost_more_than_they_save_are_not_made():
    sim, _ = run(0.4, depth=0, token_ms=2.0)
    assert sim.queues.counters.draft_tokens < 0.1 * sim.queues.counters.decoded_rows


def test_what_is_not_adaptive_drafts_always():
    sim, _ = run(0.0, depth=0, adaptive=False)
    counters = sim.queues.counters
    assert counters.draft_tokens > counters.decoded_rows


def test_a_text_that_becomes_predictable_is_noticed_without_drafting():
    """Guesses are compared with what comes, drafted or not, so that nothing has to be tried."""
    sim, drafter = run(0.0, depth=1, requests=6)
    assert not drafter.serial
    drafter.guesser.right = 1.0  # type: ignore[attr-defined]
    before = sim.queues.counters.accepted_tokens
    for at in range(6):
        client = sim.ask([at, 1, *PROMPT], max_new=60)
        sim.run()
        check_answer(sim, client)
    assert drafter.serial
    assert sim.queues.counters.accepted_tokens - before > 100


def test_requests_can_go_without_and_are_not_kept():
    drafter = HostDrafter(Seer(1.0), 8, overlaps=False, adaptive=True, clock=lambda: 0.0)
    sim = Sim(depth=0, drafter=drafter)
    quiet, other = sim.ask(PROMPT, max_new=20), sim.ask([5, *PROMPT], max_new=20, namespace="tenant")
    quiet.ask.speculate = False
    sim.run()
    check_answer(sim, quiet)
    check_answer(sim, other)
    assert (quiet.end.draft_tokens, quiet.end.decode_steps) == (0, 19)
    assert other.end.accepted_tokens > 8
    assert drafter.guesser.texts == [(other.prompt + other.tokens, "tenant")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlaps", [False, True])
def test_it_rests_until_time_has_filled_its_budget_again(overlaps: bool):
    """Where steps overlap it goes on watching, which takes no time of theirs."""
    drafter = HostDrafter(Seer(1.0), 8, overlaps=overlaps, adaptive=True, clock=lambda: 0.0)
    drafter.budget.lose(2.1)
    assert drafter.is_resting == (not overlaps)
    steps = 0
    while drafter.is_resting:
        drafter.timed(1, 1, 10.0, -1)
        steps += 1
    assert steps == (86 if not overlaps else 0), "of which each fills up 0.7 % of a plain step, to a half"
