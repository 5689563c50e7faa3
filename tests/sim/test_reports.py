"""What rows yield beyond tokens: log-probabilities and hidden states are the same however the work was cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.bench.fake_runner import prefix_hash, score
from bough.core.messages import LogprobSpec, TokenLogprobs
from tests.sim.harness import VOCAB, Client, Sim, check_answer

PROMPT = [(7 * i + 3) % VOCAB for i in range(30)]


def _joined(client: Client, name: str) -> TokenLogprobs:
    parts = [getattr(row, name) for row in client.rows if getattr(row, name) is not None]
    out = TokenLogprobs(token_ids=[], logprobs=[], top=[], chosen=[])
    for part in parts:
        out.token_ids += part.token_ids
        out.logprobs += part.logprobs
        out.top += part.top
        out.chosen += part.chosen
    return out


def _check_scores(client: Client, start: int) -> None:
    prompt, tokens = client.prompt, client.tokens
    sequence = np.array(prompt + tokens, np.int64)
    output = _joined(client, "logprobs")
    assert output.token_ids == tokens
    for at, (token, value) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert value == pytest.approx(score(sequence[: len(prompt) + at], token))
    assert [row[0][0] for row in output.top] == tokens
    assert all([i for i, _ in row] == [5, 9] for row in output.chosen)
    scored = _joined(client, "prompt_logprobs")
    if start < 0:
        assert scored.token_ids == []
        return
    assert scored.token_ids == prompt[start:]
    for at, (token, value) in enumerate(zip(scored.token_ids, scored.logprobs, strict=True), start):
        assert value is None if at == 0 else value == pytest.approx(score(sequence[:at], token))
    assert len(scored.top) == len(scored.chosen) == len(scored.token_ids)
    assert len([row for row in client.rows if row.prompt_logprobs is not None]) <= 1


ENGINES: list[dict[str, Any]] = [
    {},
    {"depth": 0},
    {"max_step_tokens": 7},
    {"max_step_tokens": 5, "page_size": 1, "num_pages": 300},
    {"page_size": 16, "num_pages": 20},
    {"radix": False},
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("start", [-1, 0, 1, 13, 29, 30])
@pytest.mark.parametrize("stream", [True, False])
def test_scores(engine: dict[str, Any], start: int, stream: bool) -> None:
    sim = Sim(**engine)
    warm = sim.ask(PROMPT, max_new=3)
    sim.run()
    spec = LogprobSpec(start=start, top=2, token_ids=(5, 9))
    client = sim.ask(PROMPT, max_new=6, logprobs=spec, stream=stream)
    beside = sim.ask(PROMPT[:8], max_new=9)
    sim.run()
    _check_scores(client, start)
    for other in (client, beside, warm):
        check_answer(sim, other)


def test_a_cached_prefix_is_used_up_to_the_first_scored_token() -> None:
    sim = Sim()
    sim.ask(PROMPT, max_new=1)
    sim.run()
    late = sim.ask(PROMPT, max_new=1, logprobs=LogprobSpec(start=17))
    early = sim.ask(PROMPT, max_new=1, logprobs=LogprobSpec(start=0))
    sim.run()
    assert late.end.cached_tokens == 16
    assert early.end.cached_tokens == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT[:2], PROMPT])
@pytest.mark.parametrize("start", [-1, 0])
def test_scores_of_a_prompt_alone_go_on_to_the_token_that_would_follow(
    engine: dict[str, Any], prompt: list[int], start: int
) -> None:
    sim = Sim(**engine)
    following = sim.ask(prompt, max_new=1)
    sim.run()
    client = sim.ask(prompt, max_new=0, logprobs=LogprobSpec(start=start, top=1, token_ids=(5, 9)))
    beside = sim.ask(prompt, max_new=4)
    sim.run()
    assert client.tokens == []
    assert (client.end.reason, client.end.completion_tokens) == ("length", 0)
    next_scores = _joined(client, "logprobs")
    assert next_scores.token_ids == following.tokens
    assert next_scores.logprobs == pytest.approx([score(np.array(prompt, np.int64), following.tokens[0])])
    assert [i for i, _ in next_scores.chosen[0]] == [5, 9]
    client.tokens = following.tokens
    _check_scores(client, start)
    check_answer(sim, beside)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("radix", [True, False])
def test_scores_survive_retraction(depth: int, radix: bool) -> None:
    sim = Sim(depth=depth, radix=radix, num_pages=22, page_size=4, conservativeness=0.0, max_step_tokens=8)
    sim.ask(PROMPT[:12], max_new=44)
    clients = [
        sim.ask(
            [i, *PROMPT[:14]], max_new=30, stream=i % 2 == 0, logprobs=LogprobSpec(start=2, top=2, token_ids=(5, 9))
        )
        for i in range(3)
    ]
    sim.run()
    assert sum(c.end.retractions for c in clients) > 0
    for client in clients:
        check_answer(sim, client)
        _check_scores(client, 2)


@pytest.mark.parametrize("radix", [True, False])
def test_scores_survive_preemption_in_the_middle_of_a_prompt(radix: bool) -> None:
    """The second time the chunks are cut elsewhere: tokens that were scored before are computed again."""
    sim = Sim(num_slots=2, priority=True, max_step_tokens=8, radix=radix, page_size=1, num_pages=200)
    sim.ask([8, 8], max_new=4)
    sim.turn()
    client = sim.ask(PROMPT, max_new=4, logprobs=LogprobSpec(start=3, top=2, token_ids=(5, 9)))
    sim.turn()
    sim.turn()
    sim.ask([9, 9, 9], max_new=1, priority=50)
    sim.run()
    assert client.end.retractions == 1
    check_answer(sim, client)
    _check_scores(client, 3)


@pytest.mark.parametrize("engine", [{}, {"max_step_tokens": 7}, {"depth": 0}])
@pytest.mark.parametrize("stream", [True, False])
def test_hidden_states(engine: dict[str, Any], stream: bool) -> None:
    sim = Sim(**engine)
    sim.ask(PROMPT, max_new=3)
    sim.run()
    every = sim.ask(PROMPT, max_new=5, hidden="all", stream=stream)
    last = sim.ask(PROMPT, max_new=5, hidden="last", stream=stream)
    sim.run()
    sequence = np.array(PROMPT + every.tokens, np.int64)
    states = [state for row in every.rows for state in row.hidden_states or []]
    assert states == [[p, prefix_hash(sequence[: p + 1]) % 997] for p in range(len(PROMPT) + 4)]
    assert last.rows[-1].hidden_states == [states[-1]]


def test_hidden_states_survive_retraction() -> None:
    sim = Sim(num_pages=18, page_size=4, conservativeness=0.0)
    sim.ask(PROMPT[:12], max_new=36)
    client = sim.ask([1, *PROMPT[:12]], max_new=36, hidden="all")
    sim.run()
    assert client.end.retractions > 0
    sequence = np.array(client.prompt + client.tokens, np.int64)
    states = [state for row in client.rows for state in row.hidden_states or []]
    assert states == [[p, prefix_hash(sequence[: p + 1]) % 997] for p in range(len(sequence) - 1)]
