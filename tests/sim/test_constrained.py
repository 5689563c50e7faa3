"""Rows under grammars and reasoning budgets: masks come in time, forced tokens skip the sampler, answers stay the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bough.core.messages import LogprobSpec
from bough.core.sampling import GrammarSpec
from bough.scheduler.constrain import Gate
from tests.sim.harness import VOCAB, ParityMatcher, Sim, alone, check_answer

PROMPT = [(7 * i + 3) % VOCAB for i in range(20)]
END = (11, 12, 13)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("run", [0, 1, 3, 7])
@pytest.mark.parametrize("length", [1, 9, 30])
def test_grammar(depth: int, run: int, length: int) -> None:
    sim = Sim(depth=depth, num_pages=128)
    free = sim.ask(PROMPT[:7], max_new=25)
    clients = [
        sim.ask(
            [i, *PROMPT], max_new=limit, stops=stops, grammar=GrammarSpec(kind="regex", source=f"{length},{run},{i}")
        )
        for i, (limit, stops) in enumerate([(40, ()), (12, ()), (40, (7, 20)), (length, ())])
    ]
    sim.run()
    check_answer(sim, free)
    for client in clients:
        limit = client.ask.sampling.max_new_tokens
        assert client.tokens == alone(client, Gate(ParityMatcher(length, run)), limit)
        assert client.end.completion_tokens == len(client.tokens)
    assert clients[0].end.reason == "stop"


def test_forced_tokens_take_fewer_steps() -> None:
    def steps(**extra: Any) -> int:
        sim = Sim()
        client = sim.ask(PROMPT, max_new=40, grammar=GrammarSpec(kind="regex", source="33,7,0"), **extra)
        sim.run()
        assert client.tokens == alone(client, Gate(ParityMatcher(33, 7)), 40)
        return sim.queues.counters.steps

    assert steps() <= 18
    assert steps(logprobs=LogprobSpec()) >= 33


def test_a_wrong_grammar_is_the_clients_error() -> None:
    sim = Sim()
    client = sim.ask(PROMPT, grammar=GrammarSpec(kind="regex", source="bad"))
    named = sim.ask(PROMPT, grammar=GrammarSpec(kind="regex", source="bad", param="guided_regex"))
    sim.run()
    assert client.end.status == 400
    assert client.end.message == "the grammar is wrong; change regex, or leave it out"
    assert client.end.param == "regex"
    assert named.end.message.endswith("; change guided_regex, or leave it out")
    assert named.end.param == "guided_regex"


def test_no_grammar_backend() -> None:
    sim = Sim()
    sim.queues.grammars = None
    client = sim.ask(PROMPT, grammar=GrammarSpec(kind="regex", source="9,0,0"))
    sim.run()
    assert client.end.status == 400
    assert "switched off" in client.end.message


@pytest.mark.parametrize("depth", [0, 1])
def test_a_matcher_that_breaks_fails_its_request_only(depth: int) -> None:
    sim = Sim(depth=depth)
    bad = sim.ask(PROMPT, max_new=20, grammar=GrammarSpec(kind="regex", source="30,0,0"))
    good = sim.ask(PROMPT, max_new=20, grammar=GrammarSpec(kind="regex", source="30,0,0"))
    for _ in range(6):
        sim.turn()
    gate = sim.queues.gates[sim.queues.where[bad.ask.id].slot]

    def broken(out: Any) -> None:
        raise RuntimeError("no state")

    gate._matcher.fill_mask = broken  # type: ignore[union-attr,method-assign]
    sim.run()
    assert bad.end.reason == "error"
    assert "no state" in bad.end.message
    assert good.tokens == alone(good, Gate(ParityMatcher(30, 0)), 20)


@pytest.mark.parametrize("depth", [0, 1])
def test_what_leaves_no_token_is_the_clients_error(depth: int) -> None:
    sim = Sim(depth=depth)
    grammar = GrammarSpec(kind="regex", source="30,0,0")
    bound, free = (sim.ask(PROMPT, max_new=20, grammar=grammar) for _ in range(2))
    bound.ask.sampling = msgspec.structs.replace(bound.ask.sampling, allowed_token_ids=(1, 2))
    for _ in range(6):
        sim.turn()
    for client in (bound, free):
        gate = sim.queues.gates[sim.queues.where[client.ask.id].slot]
        gate._matcher.accept = lambda token: False  # type: ignore[union-attr,method-assign]
    sim.run()
    assert (bound.end.reason, bound.end.status) == ("error", 400)
    assert "none is left by allowed_token_ids" in bound.end.message
    assert (free.end.reason, free.end.status) == ("error", 500)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pages", [18, 22])
def test_grammar_survives_retraction(depth: int, pages: int) -> None:
    sim = Sim(depth=depth, num_pages=pages, page_size=4, conservativeness=0.0)
    clients = [
        sim.ask([i, *PROMPT[:8]], max_new=32, grammar=GrammarSpec(kind="regex", source="32,3,0")) for i in range(4)
    ]
    sim.run()
    assert sum(c.end.retractions for c in clients) > 0
    for client in clients:
        assert client.tokens == alone(client, Gate(ParityMatcher(32, 3)), 32)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("moment", ["fail_launch", "fail_wait"])
def test_grammar_survives_running_out_of_device_memory(depth: int, moment: str) -> None:
    for at in range(2, 16):
        sim = Sim(depth=depth, **{moment: lambda step, at=at: MemoryError("no") if step.index == at else None})
        client = sim.ask(PROMPT, max_new=32, grammar=GrammarSpec(kind="regex", source="32,5,0"))
        sim.run()
        assert client.tokens == alone(client, Gate(ParityMatcher(32, 5)), 32)


# -- reasoning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [0, 1, 5, 30])
def test_thinking_budget_forces_the_marker(depth: int, budget: int) -> None:
    sim = Sim(depth=depth)
    client = sim.ask(PROMPT, max_new=24, reasoning_end=END, reasoning_open=True, thinking_budget=budget)
    free = sim.ask(PROMPT[:9], max_new=24)
    sim.run()
    assert client.tokens == alone(client, Gate(None, marker=END, budget=budget), 24)
    check_answer(sim, free)
    if budget < 20:
        assert tuple(client.tokens[budget : budget + 3]) == END
        assert client.end.reasoning_tokens == budget
    else:
        assert client.end.reasoning_tokens == 24


def test_a_budget_costs_no_masks_until_it_is_spent() -> None:
    sim = Sim()
    sim.ask(PROMPT, max_new=24, reasoning_end=END, reasoning_open=True, thinking_budget=15)
    masked = []
    launch = sim.runner.launch

    def spy(step: Any) -> Any:
        masked.append(len(step.constrained))
        return launch(step)

    sim.runner.launch = spy  # type: ignore[method-assign]
    sim.run()
    assert sum(masked) <= 4
    assert not any(masked[:15])


@pytest.mark.parametrize("depth", [0, 1])
def test_the_grammar_waits_for_the_end_of_reasoning(depth: int) -> None:
    sim = Sim(depth=depth)
    client = sim.ask(
        PROMPT,
        max_new=40,
        reasoning_end=END,
        thinking_budget=6,
        grammar=GrammarSpec(kind="regex", source="9,3,0", after_reasoning=True),
    )
    sim.run()
    gate = Gate(ParityMatcher(9, 3), marker=END, after_reasoning=True, budget=6)
    assert client.tokens == alone(client, gate, 40)
    assert client.tokens[6:9] == list(END)
    assert len(client.tokens) == 18
