"""Rows that yield 0 to k tokens a step: whatever is drafted and however much of it is right, answers and pages are the
same."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bough.core.messages import End, LogprobSpec
from bough.core.sampling import GrammarSpec
from bough.core.step import NO_PROPOSER, Step
from bough.scheduler.accept import output_limit
from tests.sim.drafters import DeviceDrafter, HostDrafter, proposer
from tests.sim.harness import VOCAB, Sim, alone, check_answer, check_scores, expected, gate_of
from tests.sim.test_traffic import EXAMPLES, Event, engines, events, play, special_asks

_QUICK = settings(max_examples=max(10, EXAMPLES // 4), deadline=None, suppress_health_check=list(HealthCheck))
PROMPT = [(7 * i + 3) % VOCAB for i in range(20)]


@st.composite
def drafting(draw: st.DrawFn) -> dict[str, Any]:
    """Where drafts come from, how often they are right, and a device that yields fewer tokens than it could, or none."""
    most, right = draw(st.integers(1, 6)), draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    made: dict[str, Any] = {}
    if draw(st.booleans()):
        made["drafter"] = HostDrafter(most, right, draw(st.sampled_from([0.0, 0.7, 1.0])))
    else:
        made |= {"drafter": DeviceDrafter(most, rests=draw(st.booleans())), "propose": proposer(right)}
    lazy, rng = draw(st.sampled_from([0.0, 0.3, 0.7])), random.Random(draw(st.integers(0, 99)))
    made["yields"] = lambda count: rng.randint(0, count) if rng.random() < lazy else count
    return made


@_QUICK
@given(engine=engines(states=True), drafts=drafting(), script=events())
def test_states_take_in_what_was_right(engine: dict[str, Any], drafts: dict[str, Any], script: list[Event]) -> None:
    """A row that yields no token at all would have its newest one in its state already, so each yields one at least."""
    some = drafts["yields"]
    sim = Sim(**engine, **{**drafts, "yields": lambda count: max(1, some(count))})
    for client in play(sim, script):
        check_answer(sim, client, failures=len(client.prompt) > sim.limits.capacity_tokens)
    assert not sim.problems


@_QUICK
@given(engine=engines(states=False), drafts=drafting(), script=events())
def test_everybody_gets_what_they_would_get_alone(
    engine: dict[str, Any], drafts: dict[str, Any], script: list[Event]
) -> None:
    sim = Sim(**engine, **drafts)
    for client in play(sim, script):
        check_answer(sim, client, failures=len(client.prompt) > sim.limits.capacity_tokens)
        check_right_drafts(client.end)
    assert not sim.problems
    assert not drafts["drafter"].begun


@_QUICK
@given(
    engine=engines(states=False),
    drafts=drafting(),
    script=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), special_asks()),
            st.tuples(st.just("ask"), special_asks()),
            st.tuples(st.just("abort"), st.integers(0, 30)),
            st.tuples(st.just("stop"), st.tuples(st.integers(0, 30), st.integers(1, 30))),
            st.tuples(st.just("wait"), st.integers(1, 12)),
        ),
        min_size=2,
        max_size=16,
    ),
    broken=st.dictionaries(st.integers(0, 40), st.sampled_from(["launch", "wait"]), max_size=2),
)
def test_constrained_and_scored_requests_and_failed_steps(
    engine: dict[str, Any], drafts: dict[str, Any], script: list[Event], broken: dict[int, str]
) -> None:
    def failing(moment: str) -> Any:
        def fail(step: Step) -> Exception | None:
            return MemoryError("out of memory") if broken.get(step.index) == moment else None

        return fail

    sim = Sim(**engine, **drafts, fail_launch=failing("launch"), fail_wait=failing("wait"))
    for client in play(sim, script):
        gate = gate_of(client)
        limit = output_limit(sim.limits, len(client.prompt), client.ask.sampling.max_new_tokens)
        if gate is None or client.stopped_at is not None:
            if gate is None:
                check_answer(sim, client, failures=True)
        elif client.end.reason in ("abort", "error"):
            assert alone(client, gate, limit)[: len(client.tokens)] == client.tokens
        else:
            assert alone(client, gate, limit) == client.tokens
        if client.ask.logprobs is not None:
            check_scores(client)


def check_right_drafts(end: End | None) -> None:
    """Every decode step is counted once, by its right drafts; also of requests that had to begin again."""
    if end is not None:
        assert sum(end.right_drafts) == end.decode_steps
        assert sum(right * steps for right, steps in enumerate(end.right_drafts)) == end.accepted_tokens


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("where", ["host", "device"])
def test_right_drafts_save_steps(where: str, depth: int) -> None:
    drafts: dict[str, Any] = {"drafter": HostDrafter(3, 1.0, 1.0)}
    if where == "device":
        drafts = {"drafter": DeviceDrafter(3), "propose": proposer(1.0)}
        drafts["drafter"].offer = lambda q, slots, most, n: _all_of(q, slots, most)
    sim = Sim(depth=depth, num_pages=128, context_length=200, **drafts)
    clients = [sim.ask([i, *PROMPT], max_new=60) for i in range(3)]
    sim.run()
    for client in clients:
        check_answer(sim, client)
        assert client.end.decode_steps <= 24
        assert client.end.accepted_tokens >= 35
        assert client.end.accepted_tokens <= client.end.draft_tokens
        assert len(client.end.right_drafts) == 4
        check_right_drafts(client.end)
    assert sim.queues.counters.accepted_tokens == drafts["drafter"].accepted > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_drafter_that_rests_is_not_asked(depth: int) -> None:
    """Steps are planned as without it, and steps of requests are still counted."""
    drafter = DeviceDrafter(3)
    sim = Sim(depth=depth, drafter=drafter, propose=proposer(1.0))
    drafter.is_resting = True
    for name in ("timed", "prompts_timed"):
        setattr(drafter, name, lambda *given: None)
    for name in ("offer", "proposals", "reach", "learn"):
        setattr(drafter, name, None)
    steps: list[Step] = []
    launch = sim.runner.launch
    sim.runner.launch = lambda step: steps.append(step) or launch(step)  # type: ignore[func-returns-value,method-assign]
    client = sim.ask(PROMPT, max_new=12)
    sim.run()
    check_answer(sim, client)
    assert client.end.decode_steps == 11
    assert {step.proposals for step in steps} == {NO_PROPOSER}


def _all_of(queues: Any, slots: Any, most: Any) -> Any:
    import numpy as np

    from bough.core.step import FIRST_DRAFT
    from bough.scheduler.drafting import Offer

    counts = np.minimum(most, queues.slots.num_proposed[slots]).astype(np.int32)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return Offer(counts, (FIRST_DRAFT - place).astype(np.int32)) if counts.any() else None


def test_a_stop_within_an_accepted_run_cuts_it_there() -> None:
    """At every place of the run; what comes behind it is neither sent nor counted, and no page is lost."""
    for place in range(1, 9):
        plain = Sim()
        probe = plain.ask(PROMPT, max_new=12)
        plain.run()
        tokens, _ = expected(plain, probe)
        stop = tokens[place]
        sim = Sim(drafter=HostDrafter(8, 1.0, 1.0))
        client = sim.ask(PROMPT, max_new=12, stops=(stop,))
        sim.run()
        assert client.tokens == tokens[: tokens.index(stop) + 1]
        assert client.end.reason == "stop"
        assert client.end.matched == stop
        assert client.end.completion_tokens == len(client.tokens)


@pytest.mark.parametrize("limit", range(1, 12))
def test_the_limit_of_tokens_cuts_a_run(limit: int) -> None:
    sim = Sim(drafter=HostDrafter(5, 1.0, 1.0))
    client = sim.ask(PROMPT, max_new=limit)
    floor = sim.ask(PROMPT, max_new=limit, min_new=limit, stops=tuple(range(VOCAB)))
    sim.run()
    check_answer(sim, client)
    check_answer(sim, floor)
    assert len(client.tokens) == len(floor.tokens) == limit


def test_a_grammar_that_completes_within_a_run_ends_the_row() -> None:
    for length in range(1, 12):
        sim = Sim(drafter=HostDrafter(6, 1.0, 1.0), num_pages=128)
        client = sim.ask(PROMPT, max_new=40, grammar=GrammarSpec(kind="regex", source=f"{length},2,0"))
        sim.run()
        gate = gate_of(client)
        assert gate is not None
        assert client.tokens == alone(client, gate, 40)
        assert client.end.reason == "stop"


def test_forced_tokens_behind_one_that_did_not_come_are_taken_back() -> None:
    """A step that had begun with them reads where nothing was written, and is dropped for the row."""
    steps = count()
    sim = Sim(
        page_size=1, num_pages=200, drafter=DeviceDrafter(3), propose=proposer(0.5),
        yields=lambda most: most if next(steps) % 4 else 0,
    )  # fmt: skip
    client = sim.ask(PROMPT, max_new=40, grammar=GrammarSpec(kind="regex", source="40,3,0"))
    sim.run()
    gate = gate_of(client)
    assert gate is not None
    assert client.tokens == alone(client, gate, 40)


@pytest.mark.parametrize("hidden", ["all", "last"])
def test_hidden_states_and_scores_are_those_of_tokens_that_were_taken(hidden: str) -> None:
    for right in (0.5, 1.0):
        results = []
        for drafter in (None, HostDrafter(5, right, 1.0)):
            sim = Sim(drafter=drafter)
            client = sim.ask(PROMPT, max_new=17, hidden=hidden, stops=(3,), logprobs=LogprobSpec(start=2, top=1))
            sim.run()
            check_answer(sim, client)
            check_scores(client)
            states = [state for row in client.rows for state in row.hidden_states or []]
            results.append(states if hidden == "all" else states[-1:])
        assert results[0] == results[1]
        assert len(results[0]) == (len(PROMPT) + len(client.tokens) - 1 if hidden == "all" else 1)
