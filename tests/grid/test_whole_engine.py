"""From a client's request to its answer, through every part: cases that random workloads found, and random workloads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from by_the_book import Book
from in_process import Setup
from whole_engine import EOS, Family, WholeEngine, grammars_for, make_family
from workloads import Event, Workload, make_workload, run

from bough.core.errors import InvalidRequest
from bough.core.messages import Generate, LogprobSpec, pack_ids
from bough.core.sampling import SamplingParams
from bough.grammar import Grammars
from tests.covers import long

Bench = tuple[Family, Book, dict[str, Grammars]]


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3", "qwen3_moe"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from _bench(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from _bench("llama", tmp_path_factory.mktemp("llama"))


def _bench(case: str, folder: Path) -> Iterator[Bench]:
    family = make_family(case, folder)
    grammars = {name: grammars_for(family.tokenizer, name) for name in ("xgrammar", "llguidance")}
    yield family, Book(family), grammars
    for each in grammars.values():
        each.close()


def ask(turn: int = 0, **fields: Any) -> Event:
    return Event(turn, "ask", fields)


def check(bench: Bench, *events: Event, setup: Setup | None = None, lag: int = 0) -> None:
    run(Workload(0, setup or Setup(), lag, "xgrammar", list(events)), *bench)


GREEDY = {"temperature": 0.0, "max_new_tokens": 24}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("states", [True, "last"])
def test_hidden_states_end_where_a_stop_string_does(llama: Bench, stream: bool, states: bool | str) -> None:
    """The book counts them: one for each prompt token and each output token but the last."""
    params = {**GREEDY, "stop": list("abcdefghijklmnopqrstuvwxyz")}
    prompts = [[5, 6, 7], [91, 14], [200, 201, 202, 203]]
    events = [
        ask(input_ids=prompt, sampling_params=params, stream=stream, return_hidden_states=states) for prompt in prompts
    ]
    check(llama, *events, lag=3)


def test_ids_that_the_tokenizer_lacks_add_nothing_to_the_text(llama: Bench) -> None:
    params = {**GREEDY, "allowed_token_ids": [325, 140, 170, 230, 330], "repetition_penalty": 2.0}
    check(llama, *(ask(input_ids=[at], sampling_params=params, stream=at % 2 == 0) for at in range(3, 9)))


def test_a_constrained_answer_does_not_show_the_token_that_completed_it(llama: Bench) -> None:
    """The book asks whether the text fits the constraint. `ignore_eos` can't mean that a grammar never ends."""
    shown = {**GREEDY, "ignore_eos": True, "skip_special_tokens": False}
    ending = {"logit_bias": {str(EOS): 100.0}}
    events = [
        ask(input_ids=[9], sampling_params={**shown, **ending, "choice": ["naïve café", "naïve"]}),
        ask(input_ids=[9], sampling_params={**shown, **ending, "regex": "(ab|cd)+x?"}),
    ]
    check(llama, *events)


def test_where_nothing_is_left_of_the_allowed_tokens_the_request_fails_alone(llama: Bench) -> None:
    engine = WholeEngine(llama[0], Setup(), grammars=llama[2]["xgrammar"])
    only = {**GREEDY, "allowed_token_ids": [EOS, 67]}
    wrong = [
        {**only, "stop_token_ids": [67], "min_new_tokens": 3},
        {**only, "choice": ["yes", "no"]},
        {**only, "temperature": 1.0, "stop_token_ids": [67], "min_new_tokens": 1},
    ]
    asked = [engine.ask(input_ids=[5, 6], sampling_params=params)[0] for params in (only, *wrong)]
    engine.settle_down()
    assert set(asked[0].output) <= {EOS, 67}
    for each in asked[1:]:
        end = each.whole.end
        assert end is not None
        assert (end.reason, end.status, each.output) == ("error", 400, []), "the client's mistake"
        assert "allowed_token_ids" in end.message
    engine.check_quiet()
    engine.close()


BESIDE = {"input_ids": [5, 6, 7], "sampling_params": GREEDY}


def test_a_long_banned_phrase_fails_nobody(llama: Bench) -> None:
    params = {**GREEDY, "bad_words": ["the quick brown fox jumps over the lazy dog"]}
    check(llama, ask(**BESIDE), ask(input_ids=[5, 6], sampling_params=params))


def test_more_alternatives_than_tokens_are_all_of_them(llama: Bench) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 1000, "logprob_start_len": 0}
    check(llama, ask(**BESIDE), ask(input_ids=[5, 6], sampling_params=GREEDY, **fields))


def test_scores_of_tokens_that_do_not_exist_are_refused(llama: Bench) -> None:
    """At the door, and by the engine itself: a step that meets them fails everybody in it."""
    engine = WholeEngine(llama[0], Setup())
    with pytest.raises(InvalidRequest, match="token_ids_logprob has token id 331"):
        engine.ask(input_ids=[5, 6], sampling_params=GREEDY, return_logprob=True, token_ids_logprob=[3, 331])
    (beside,) = engine.ask(**BESIDE)
    engine.wire.incoming.append(
        Generate(
            id=1,
            rid="",
            prompt=pack_ids([5]),
            sampling=SamplingParams(),
            logprobs=LogprobSpec(token_ids=(331,)),
        )
    )
    engine.settle_down()
    assert beside.whole.end is not None
    assert beside.whole.end.reason == "length"
    assert engine.parts.queues.counters.failed == 1
    engine.close()


@pytest.mark.parametrize("seed", [*range(4), *map(long, range(4, 8))])
def test_random_workloads(bench: Bench, seed: int) -> None:
    run(make_workload(seed, bench[0]), *bench)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_random_workloads(bench: Bench) -> None:
    for seed in range(1000, 1300):
        run(make_workload(seed, bench[0]), *bench)
