"""Choosing by likelihood: against brute force with the toy model, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lang_toy_model as toy
import pytest
from hypothesis import given, settings, strategies as st
from lang_fake_server import FakeServer

import bough.lang as sgl
from bough.lang.choices import ChoiceScores, decide


@sgl.function
def pick(s, prompt, options, method):
    s += prompt + sgl.select("x", options, choices_method=method)


def brute_force_scores(prompt: str, options: Sequence[str]) -> list[list[float]]:
    """Logprobs of each option's tokens from the first token that differs from the prompt's own for any option."""
    own = toy.tokenize(prompt)
    rows = [toy.tokenize(prompt + option) for option in options]
    start = min(next((i for i, t in enumerate(own) if i >= len(row) or row[i] != t), len(own)) for row in rows)
    return [[p for p in toy.input_logprobs(row)[start:] if p is not None] for row in rows]


PROMPTS = ["The answer is:", "The answer is: ", "Say y", "London and Par", "x", ""]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("options", [["yes", "no"], [" Paris", " the", "\n"], ["es\n", "ton", "a longer one"]])
def test_token_length_normalized_is_the_best_mean(
    backend: sgl.RuntimeEndpoint, prompt: str, options: list[str]
) -> None:
    state = pick.run(prompt=prompt, options=options, method=sgl.token_length_normalized, backend=backend)
    means = [sum(row) / len(row) if row else 0.0 for row in brute_force_scores(prompt, options)]
    assert state["x"] == options[means.index(max(means))]
    assert state.get_meta_info("x")["normalized_prompt_logprobs"] == pytest.approx(means)
    assert state.text() == prompt + state["x"]


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.text("ins the:yPaLod.", max_size=12),
    options=st.lists(st.text("ins the:yPaLod.", min_size=1, max_size=6), min_size=2, max_size=4, unique=True),
)
def test_any_prompt_and_options_agree_with_brute_force(running: FakeServer, prompt: str, options: list[str]) -> None:
    running.start_anew()
    endpoint = sgl.RuntimeEndpoint(running.url)
    state = pick.run(prompt=prompt, options=options, method=sgl.token_length_normalized, backend=endpoint)
    means = [sum(row) / len(row) if row else 0.0 for row in brute_force_scores(prompt, options)]
    assert state.get_meta_info("x")["normalized_prompt_logprobs"] == pytest.approx(means)


def test_a_choice_costs_one_prompt_and_the_options(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    prompt = "A long prompt about many things. " * 20 + "The answer is"
    options = [" yes", " no", " the", " Paris and London"]
    pick.run(prompt=prompt, options=options, method=sgl.token_length_normalized, backend=backend)
    option_tokens = sum(len(toy.tokenize(option)) for option in options)
    look_back = 2 * (len(options) + 1)
    assert fake.computed_tokens <= len(toy.tokenize(prompt)) + option_tokens + look_back
    scoring = [body for body in fake.bodies("/generate") if isinstance(body["text"], list)]
    assert len(scoring) == 1
    assert scoring[0]["sampling_params"]["max_new_tokens"] == 0
    assert scoring[0]["logprob_start_len"] == len(toy.tokenize(prompt)) - 2


def test_greedy_token_selection_follows_the_best_first_token(backend: sgl.RuntimeEndpoint) -> None:
    prompt, options = "Say", [" Paris", " Pa", " the end", " is"]
    state = pick.run(prompt=prompt, options=options, method=sgl.greedy_token_selection, backend=backend)
    rows = brute_force_scores(prompt, options)
    remaining = list(range(len(options)))
    for step in range(max(map(len, rows))):
        values = {i: rows[i][step] if step < len(rows[i]) else sum(rows[i]) / len(rows[i]) for i in remaining}
        best = max(values.values())
        remaining = [i for i in remaining if values[i] == best]
    assert state["x"] == options[remaining[0]]
    assert len(state.get_meta_info("x")["greedy_logprob_matrix"]) == 4


def test_greedy_keeps_choices_together_that_share_a_noisy_token() -> None:
    tokens = [
        [[-1.0, 5, "a"], [-3.0, 6, "b"]],
        [[-1.00001, 5, "a"], [-0.1, 7, "c"]],
        [[-1.5, 8, "z"], [-0.01, 9, "y"]],
    ]
    decision = sgl.greedy_token_selection(
        choices=["ab", "ac", "zy"],
        normalized_prompt_logprobs=[-2.0, -0.5, -0.7],
        input_token_logprobs=tokens,
        output_token_logprobs=[[], [], []],
    )
    assert decision.decision == "ac"


def test_unconditional_likelihood_normalized(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    prompt, options = "The capital is", [" Paris", " the big one", " no"]
    state = pick.run(prompt=prompt, options=options, method=sgl.unconditional_likelihood_normalized, backend=backend)
    scores = []
    for option, row in zip(options, brute_force_scores(prompt, options), strict=True):
        alone = [p or 0.0 for p in toy.input_logprobs(toy.tokenize(option))]
        scores.append(sum(a - b for a, b in zip(row, alone, strict=True)) / len(row))
    assert state["x"] == options[scores.index(max(scores))]
    meta = state.get_meta_info("x")
    assert meta["normalized_unconditional_prompt_logprobs"] == pytest.approx(scores)


def test_a_method_of_ones_own(backend: sgl.RuntimeEndpoint) -> None:
    class Longest(sgl.ChoicesSamplingMethod):
        def __call__(self, *, choices: Sequence[str], **scores: Any) -> sgl.ChoicesDecision:
            assert set(scores) >= {"normalized_prompt_logprobs", "input_token_logprobs"}
            return sgl.ChoicesDecision(max(choices, key=len), {"mine": True})

    state = pick.run(prompt="x", options=["a", "abc", "ab"], method=Longest(), backend=backend)
    assert state["x"] == "abc"
    assert state.get_meta_info("x") == {"mine": True}


def test_gen_with_choices_is_select(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "The answer is" + sgl.gen("x", choices=[" yes", " no"])

    by_select = pick.run(
        prompt="The answer is", options=[" yes", " no"], method=sgl.token_length_normalized, backend=backend
    )
    assert program.run(backend=backend)["x"] == by_select["x"]


def test_temperature_draws_from_the_softmax() -> None:
    scores = ChoiceScores(
        choices=["a", "b"],
        normalized_prompt_logprobs=[math.log(0.75), math.log(0.25)],
        input_token_logprobs=[[], []],
        output_token_logprobs=[[], []],
    )
    drawn = [decide(sgl.token_length_normalized, 1.0, scores).decision for _ in range(4000)]
    assert drawn.count("a") / 4000 == pytest.approx(0.75, abs=0.04)
    assert {decide(sgl.token_length_normalized, 0.0, scores).decision for _ in range(20)} == {"a"}
    with pytest.raises(sgl.LangError, match="temperature"):
        decide(sgl.greedy_token_selection, 1.0, scores)


@pytest.mark.parametrize("choices", [None, [], "yes", ["yes", ""], ["yes", 3]])
def test_bad_choices_are_refused(choices: Any) -> None:
    with pytest.raises(sgl.LangError):
        sgl.select("x", choices)
    with pytest.raises(sgl.LangError, match="ChoicesSamplingMethod"):
        sgl.select("x", ["a"], choices_method="greedy")  # type: ignore[arg-type]
