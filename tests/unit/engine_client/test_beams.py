"""Beam search against transformers' own, driven by the same tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bough.core.errors import BoughError, InvalidRequest, RequestFailed, Unavailable
from bough.core.messages import Delta, End, Ids, LogprobSpec, TokenLogprobs, unpack_ids
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.engine_client.beams import Ask, BeamSearch, Search, check
from bough.engine_client.request import Request
from bough.engine_client.sessions import SessionParams
from bough.engine_client.stream import DeltaStream

VOCAB, EOS = 24, 3
PROMPT = np.array([5, 6, 7], np.int32)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
        initializer_range=0.6, tie_word_embeddings=False,
    )  # fmt: skip
    yield LlamaForCausalLM(config).eval()
    torch.set_num_threads(threads)


def expected(model: Any, prompt: list[int], width: int, count: int, most: int, least: int) -> list[list[int]]:
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=count, max_new_tokens=most,
            min_new_tokens=least or None, do_sample=False, early_stopping=False, length_penalty=1.0,
        )  # fmt: skip
    found = []
    for row in made[:, len(prompt) :].tolist():
        end = row.index(EOS) + 1 if EOS in row else len(row)
        found.append(row[:end])
    return found


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize(("most", "least"), [(1, 0), (6, 0), (14, 0), (14, 4)])
def test_the_answers_are_those_of_transformers(model: Any, width: int, most: int, least: int) -> None:
    stopped = 0
    for seed in range(4):
        prompt = torch.randint(4, VOCAB, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
        search = BeamSearch(width=width, max_new_tokens=most, min_new_tokens=least, stops=frozenset({EOS}))
        while not search.done:
            with torch.no_grad():
                batch = torch.tensor([[*prompt, *beam.tokens] for beam in search.live])
                logprobs = torch.log_softmax(model(batch).logits[:, -1].float(), -1)
            best = logprobs.topk(min(search.num_candidates, VOCAB), -1)
            rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            search.advance([list(zip(ids, scores, strict=True)) for ids, scores in rows])
        ours = [list(beam.tokens) for beam in search.best(width)]
        if width == 1:
            assert len(ours) == 1
            continue  # transformers' greedy search ends at the first end token, a search of one beam need not
        assert ours == expected(model, prompt, width, width, most, least), seed
        scores = [beam.score for beam in search.best(width)]
        assert scores == sorted(scores, reverse=True)
        stopped += sum(tokens[-1] == EOS for tokens in ours)
    if most == 14 and width > 1:
        assert stopped, "no answer ended by itself: the test says too little"


@pytest.mark.parametrize(
    ("sampling", "request_"),
    [
        ({"frequency_penalty": 1.0}, {}),
        ({"stop": ("x",)}, {}),
        ({"logit_bias": {1: 1.0}}, {}),
        ({"grammar": GrammarSpec(kind="regex", source="a")}, {}),
        ({"n": 5}, {}),
        ({"max_new_tokens": 0}, {}),
        ({"beam_width": 64, "stop_token_ids": tuple(range(30))}, {}),
        ({}, {"logprobs": LogprobSpec(start=0)}),
        ({}, {"session": SessionParams(id="x")}),
        ({}, {"hidden_states": "all"}),
    ],
)
def test_what_a_search_can_not_respect_is_refused(sampling: dict[str, Any], request_: dict[str, Any]) -> None:
    params = SamplingParams(**{"beam_width": 4, **sampling})
    with pytest.raises(InvalidRequest):
        check(Request(prompt="a", sampling=params, **request_), params, 1 + len(params.stop_token_ids))


@pytest.mark.parametrize(
    ("vocab", "most", "least", "answers"),
    [(5, 1, 0, 5), (5, 1, 1, 4), (2, 3, 0, 4), (1, 3, 0, 1), (1, 1, 1, 0), (3, 4, 2, 6)],
)
async def test_more_answers_than_there_are_is_an_error(vocab: int, most: int, least: int, answers: int) -> None:
    """Token 0 ends an answer; with `vocab` tokens there are `answers` of them that a search of six beams can find."""

    async def ask(prompts: Sequence[Ids]) -> list[Delta]:
        row = [(token, float(np.log(1 / vocab))) for token in range(vocab)] + [(9, -np.inf), (10, np.nan)]
        scores = TokenLogprobs([0], [0.0], top=[row])
        return [Delta(id=1, logprobs=scores, end=End(reason="length")) for _ in prompts]

    for n in range(1, 7):
        streams = [DeltaStream(at, "rid", at, PROMPT, lambda _id, _reason: None) for at in range(n)]
        search = BeamSearch(width=6, max_new_tokens=most, min_new_tokens=least, stops=frozenset({0}))
        ended: list[bool] = []
        Search(search, streams, PROMPT, ask, lambda at, delta: streams[at].deliver(delta), lambda: ended.append(True))  # noqa: B023
        waits = [asyncio.wait_for(stream.collect(), 5) for stream in streams]
        told = await asyncio.gather(*waits, return_exceptions=True)
        assert ended == [True]
        if n <= answers:
            texts = {bytes(each.tokens) for each in told if isinstance(each, Delta)}
            assert len(texts) == n
            assert all(token < vocab for text in texts for token in unpack_ids(text).tolist())
        else:
            assert all(isinstance(each, InvalidRequest) and each.param == "n" for each in told), told


# -- a search under way ---------------------------------------------------------------------------


class Watched:
    """A search whose steps are asked of `ask`; counts how often it has ended."""

    def __init__(self, ask: Ask) -> None:
        self.ended = 0
        self.stream = DeltaStream(1, "rid", 0, PROMPT, lambda _id, _reason: None)
        search = BeamSearch(width=2, max_new_tokens=4, stops=frozenset({EOS}))
        self.search = Search(search, [self.stream], PROMPT, ask, self._answered, self._count)

    def _answered(self, at: int, delta: Delta) -> None:
        assert at == 0
        self.stream.deliver(delta)

    def _count(self) -> None:
        self.ended += 1


async def never(_prompts: Sequence[Ids]) -> list[Delta]:
    await asyncio.Event().wait()
    return []


@pytest.mark.parametrize(
    ("raised", "told"),
    [(Unavailable(what="the engine has stopped"), Unavailable), (IndexError("a defect"), RequestFailed)],
)
async def test_whoever_waits_for_a_failed_search_is_told(raised: Exception, told: type[BoughError]) -> None:
    async def fail(_prompts: Sequence[Ids]) -> list[Delta]:
        raise raised

    watched = Watched(fail)
    with pytest.raises(told):
        await asyncio.wait_for(watched.stream.collect(), 30)
    assert watched.ended == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_an_aborted_search_tells_its_streams_even_before_its_first_step(begun: bool) -> None:
    watched = Watched(never)
    if begun:
        await asyncio.sleep(0)
    watched.search.abort("enough")
    whole = await asyncio.wait_for(watched.stream.collect(), 30)
    assert whole.end is not None
    assert (whole.end.reason, whole.end.message) == ("abort", "enough")
    assert watched.ended == 1


async def test_a_search_that_nobody_waits_for_ends() -> None:
    watched = Watched(never)
    watched.search.give_up()
    await asyncio.sleep(0)
    assert watched.ended == 0, "somebody waits"
    watched.stream.abort()
    watched.search.give_up()
    for _ in range(3):
        await asyncio.sleep(0)
    assert watched.ended == 1
