"""Whole answers: the engine's messages in, deltas and stops out."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from bough.core.messages import (
    WORKER_SHIFT,
    Began,
    Content,
    Delta,
    Deltas,
    End,
    Reasoning,
    Reply,
    RowOutput,
    StopAt,
    TextSpec,
    TokenLogprobs,
    Tokens,
    pack_ids,
    unpack_ids,
)
from bough.detokenizer.process import Answers
from bough.parsers import assemble
from bough.tokenizer import Tokenizer

LENGTH = End(reason="length", prompt_tokens=5, completion_tokens=99, cached_tokens=3)


def tokens(request_id: int, ids: list[int], **row: Any) -> Tokens:
    rows = {0: RowOutput(**row)} if row else {}
    return Tokens(ids=[request_id], counts=[len(ids)], tokens=pack_ids(ids), rows=rows)


def news(answers: Answers, worker: int = 0) -> tuple[list[Delta], list[StopAt]]:
    home, stops = answers.take()
    deltas = [each for message in home.get(worker, []) if isinstance(message, Deltas) for each in message.deltas]
    return deltas, stops


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def begin(tokenizer: Tokenizer | None, **spec: Any) -> Answers:
    answers = Answers(tokenizer)
    answers.handle(Began(id=1, rid="r", text=TextSpec(**spec)))
    return answers


def test_streamed_text_equals_the_whole(smollm: Tokenizer) -> None:
    text = "Hello 🎉 wörld, and good bye."
    ids = smollm.encode(text)
    answers = begin(smollm)
    got: list[Delta] = []
    for place, token_id in enumerate(ids):
        row = {"end": LENGTH} if place == len(ids) - 1 else {}
        answers.handle(tokens(1, [token_id], **row))
        deltas, stops = news(answers)
        assert stops == []
        assert len(deltas) == 1
        got += deltas
    assert text_of(got) == text
    assert unpack_ids(b"".join(delta.tokens for delta in got)).tolist() == ids
    assert [delta.end for delta in got if delta.end is not None] == [LENGTH]
    assert len(answers) == 0


def test_deltas_come_every_so_many_tokens(smollm: Tokenizer) -> None:
    ids = smollm.encode("one two three four five six seven")
    answers = begin(smollm, every=3)
    counts = []
    for token_id in ids:
        answers.handle(tokens(1, [token_id]))
        counts += [len(delta.tokens) // 4 for delta in news(answers)[0]]
    assert counts == [3] * (len(ids) // 3)
    answers.handle(tokens(1, [], end=LENGTH))
    deltas, _ = news(answers)
    assert len(deltas) == 1
    assert len(deltas[0].tokens) // 4 == len(ids) % 3


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_ends_the_answer_and_the_engine_is_told(smollm: Tokenizer, keep: bool) -> None:
    ids = smollm.encode("first line\nsecond STOPPED here")
    answers = begin(smollm, stop=("STOP",), no_stop_trim=keep)
    got: list[Delta] = []
    told: list[StopAt] = []
    for token_id in ids:
        answers.handle(tokens(1, [token_id]))
        deltas, stops = news(answers)
        got, told = got + deltas, told + stops
    assert text_of(got) == "first line\nsecond " + ("STOP" if keep else "")
    assert len(told) == 1
    at = told[0].num_tokens
    assert "STOP" in smollm.decode(ids[:at])
    assert "STOP" not in smollm.decode(ids[: at - 1])
    assert unpack_ids(b"".join(delta.tokens for delta in got)).tolist() == ids[:at]
    assert all(delta.end is None for delta in got), "the end comes with the engine's account"
    answers.handle(tokens(1, [7, 8, 9], end=LENGTH))
    deltas, stops = news(answers)
    assert stops == []
    assert len(deltas) == 1
    end = deltas[0].end
    assert end is not None
    assert (end.reason, end.matched, end.completion_tokens) == ("stop", "STOP", at)
    assert (end.prompt_tokens, end.cached_tokens) == (5, 3)
    assert deltas[0].text == ""
    assert deltas[0].tokens == b""
    assert len(answers) == 0


def test_a_stop_found_in_the_last_tokens_wins_over_the_engines_reason(smollm: Tokenizer) -> None:
    ids = smollm.encode("a STOP b")
    answers = begin(smollm, stop=("STOP",), every=2**31 - 1)
    answers.handle(tokens(1, ids, end=LENGTH))
    deltas, stops = news(answers)
    assert stops == []
    assert len(deltas) == 1
    assert deltas[0].text == "a "
    assert deltas[0].end is not None
    assert deltas[0].end.reason == "stop"
    assert deltas[0].end.completion_tokens == len(deltas[0].tokens) // 4 < len(ids)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_verdict_does_not_depend_on_how_tokens_arrive(smollm: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["abc END def", "E EN END!", "no stop at all", "ENEND x", "tail EN"]))
    ids = smollm.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    results = []
    for edges in ([0, *cuts, len(ids)], list(range(len(ids) + 1))):
        answers = begin(smollm, stop=("END",))
        got: list[Delta] = []
        for a, b in itertools.pairwise(edges):
            answers.handle(tokens(1, ids[a:b]))
            got += news(answers)[0]
        answers.handle(tokens(1, [], end=LENGTH))
        got += news(answers)[0]
        ends = [delta.end for delta in got if delta.end is not None]
        assert len(ends) == 1
        kept = unpack_ids(b"".join(delta.tokens for delta in got)).tolist()
        results.append((text_of(got), kept, ends[0].reason, ends[0].completion_tokens if ends[0].matched else 0))
    assert results[0] == results[1]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_half_a_character_stops_no_answer_that_was_cut(smollm: Tokenizer, reason: str) -> None:
    first, *rest = smollm.encode("🎉")
    assert rest
    answers = begin(smollm, stop=("\ufffd",))
    answers.handle(tokens(1, [first], end=End(reason=reason, completion_tokens=1)))
    deltas, _ = news(answers)
    assert (deltas[-1].end.reason, deltas[-1].end.matched) == (reason, None)
    assert text_of(deltas) == "\ufffd"


def test_held_text_leaves_when_the_answer_ends(smollm: Tokenizer) -> None:
    answers = begin(smollm, stop=("<END>",))
    answers.handle(tokens(1, smollm.encode("text <EN")))
    assert text_of(news(answers)[0]) == "text "
    answers.handle(tokens(1, [], end=LENGTH))
    assert text_of(news(answers)[0]) == "<EN"


@pytest.mark.parametrize(("spec", "expected"), [({}, "hi"), ({"skip_special_tokens": False}, "hi")])
def test_the_stop_token_is_no_text(smollm: Tokenizer, spec: dict[str, Any], expected: str) -> None:
    eos = smollm.id_of("<|im_end|>")
    answers = begin(smollm, **spec)
    answers.handle(tokens(1, [*smollm.encode("hi"), eos], end=End(reason="stop", matched=eos, completion_tokens=2)))
    deltas, _ = news(answers)
    assert deltas[0].text == expected
    assert unpack_ids(deltas[0].tokens).tolist()[-1] == eos


def test_the_stop_token_is_text_if_asked_for(smollm: Tokenizer) -> None:
    eos = smollm.id_of("<|im_end|>")
    answers = begin(smollm, skip_special_tokens=False, no_stop_trim=True)
    answers.handle(tokens(1, [*smollm.encode("hi"), eos], end=End(reason="stop", matched=eos)))
    assert news(answers)[0][0].text == "hi<|im_end|>"


def test_logprobs_are_cut_where_the_text_is(smollm: Tokenizer) -> None:
    ids = smollm.encode("one STOP two")
    answers = begin(smollm, stop=("STOP",), logprob_text=True)
    got: list[Delta] = []
    for token_id in ids:
        scores = TokenLogprobs([token_id], [-0.5], top=[[(token_id, -0.5), (ids[0], -2.0)]])
        answers.handle(tokens(1, [token_id], logprobs=scores))
        got += news(answers)[0]
    answers.handle(tokens(1, [], end=LENGTH))
    got += news(answers)[0]
    kept = [delta.logprobs for delta in got if delta.logprobs is not None]
    scored = [token_id for part in kept for token_id in part.token_ids]
    assert scored == unpack_ids(b"".join(delta.tokens for delta in got)).tolist()
    assert len(scored) < len(ids)
    assert "".join(text for part in kept for text in part.text) == smollm.decode(scored)
    assert kept[0].top_text == [[smollm.decode(ids[:1])] * 2]


def test_reasoning_and_content_are_told_apart(smollm: Tokenizer) -> None:
    text = "<think>because</think>the answer"
    whole, ids = [], smollm.encode(text)
    answers = begin(smollm, reasoning_parser="qwen3")
    for token_id in ids:
        answers.handle(tokens(1, [token_id]))
        whole += [event for delta in news(answers)[0] for event in delta.events]
    answers.handle(tokens(1, [], end=LENGTH))
    whole += [event for delta in news(answers)[0] for event in delta.events]
    parsed = assemble(whole)
    assert (parsed.reasoning, parsed.content) == ("because", "the answer")
    assert {type(event) for event in whole} == {Reasoning, Content}


@pytest.mark.parametrize(("calls_only", "content"), [(True, ""), (False, "<tool_call>")])
def test_a_forced_call_cut_before_its_name_is_no_content(smollm: Tokenizer, calls_only: bool, content: str) -> None:
    answers = begin(smollm, tool_parser="hermes", calls_only=calls_only)
    answers.handle(tokens(1, smollm.encode("<tool_call>"), end=LENGTH))
    assert assemble([event for delta in news(answers)[0] for event in delta.events]).content == content


def test_a_stop_string_ends_parsing_too(smollm: Tokenizer) -> None:
    answers = begin(smollm, reasoning_parser="qwen3", stop=("STOP",))
    events = []
    for token_id in smollm.encode("<think>a</think>bc STOP de"):
        answers.handle(tokens(1, [token_id]))
        events += [event for delta in news(answers)[0] for event in delta.events]
    answers.handle(tokens(1, [], end=LENGTH))
    events += [event for delta in news(answers)[0] for event in delta.events]
    assert assemble(events).content.strip() == "bc"


@pytest.mark.parametrize(
    "spec",
    [{"reasoning_parser": "no such"}, {"tool_parser": "hermes", "tools": "{"}, {"stop_regex": (r"[ab]{0,300}c",)}],
)
def test_a_request_that_can_not_be_decoded_fails_alone(smollm: Tokenizer, spec: dict[str, Any]) -> None:
    answers = begin(smollm, **spec)
    answers.handle(Began(id=2, rid="other", text=TextSpec()))
    a = smollm.encode("a" * 3000, add_special_tokens=False)
    both = Tokens(ids=[1, 2], counts=[len(a), 1], tokens=pack_ids([*a, a[0]]))
    answers.handle(both)
    deltas, stops = news(answers)
    assert [stop.id for stop in stops] == [1]
    assert [delta.id for delta in deltas if delta.text] == [2]
    answers.handle(tokens(1, [], end=End(reason="stop", prompt_tokens=5)))
    deltas, _ = news(answers)
    assert deltas[0].end is not None
    assert deltas[0].end.reason == "error"
    assert deltas[0].end.status == 400
    assert deltas[0].end.message
    assert deltas[0].end.prompt_tokens == 5


def test_requests_without_text_pass_through(smollm: Tokenizer) -> None:
    for answers in (Answers(None), Answers(smollm)):
        answers.handle(Began(id=1, rid="r"))
        answers.handle(tokens(1, [4, 5], end=LENGTH, embedding=b"1234"))
        deltas, _ = news(answers)
        assert deltas == [Delta(id=1, tokens=pack_ids([4, 5]), end=LENGTH, embedding=b"1234")]
        assert len(answers) == 0


def test_unknown_requests_are_ignored(smollm: Tokenizer) -> None:
    answers = Answers(smollm)
    answers.handle(tokens(77, [1, 2]))
    assert answers.take() == ({}, [])


def test_news_and_replies_go_home_in_order(smollm: Tokenizer) -> None:
    here, there = (2 << WORKER_SHIFT) | 1, (3 << WORKER_SHIFT) | 1
    answers = Answers(smollm)
    for request_id in (here, there):
        answers.handle(Began(id=request_id, rid="", text=TextSpec()))
    message = Tokens(ids=[here, there], counts=[1, 1], tokens=pack_ids([40, 41]))
    answers.handle(message)
    answers.handle(Reply(call=here))
    answers.handle(message)
    home, _ = answers.take()
    assert [type(each) for each in home[2]] == [Deltas, Reply, Deltas]
    assert [len(each.deltas) for each in home[3] if isinstance(each, Deltas)] == [2]


def test_a_step_of_many_rows_is_quick(smollm: Tokenizer) -> None:
    """256 rows a step, a quarter with stop strings: far less than any step of a model takes."""
    answers = Answers(smollm)
    rows = 256
    for request_id in range(rows):
        stop = ("\n\nUser:", "</s>") if request_id % 4 == 0 else ()
        answers.handle(Began(id=request_id, rid="", text=TextSpec(stop=stop)))
    message = Tokens(ids=list(range(rows)), counts=[1] * rows, tokens=pack_ids(list(range(300, 300 + rows))))
    best = float("inf")
    for _ in range(50):
        started = time.perf_counter()
        answers.handle(message)
        answers.take()
        best = min(best, time.perf_counter() - started)
    print(f"{best * 1e3:.2f} ms")
    assert best < 0.01


HOSTILE = {
    "wide": tuple(rf"[a-z ]{{0,{40 + number}}}[XY]{number}" for number in range(30)),
    "nested": tuple(rf"(([a-z]+ ?)+)+[{number % 10}]#" for number in range(32)),
    "anything": tuple(rf"[\s\S]*[\s\S]*[\s\S]*{number}!" for number in range(32)),
    "literals": tuple("a" * 200 + rf"\d{number}" for number in range(20)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_patterns_of_one_request_delay_no_other(smollm: Tokenizer, kind: str) -> None:
    """64 answers watched for 32 patterns, beside somebody else's stream: no turn takes long, whatever becomes of them."""
    answers = Answers(smollm)
    for number in range(1, 65):
        answers.handle(Began(id=number, rid="hostile", text=TextSpec(stop_regex=HOSTILE[kind])))
    answers.handle(Began(id=100, rid="other", text=TextSpec()))
    ids = smollm.encode("aaaa a quick brown fox jumps over lazy dogs" * 3)
    said, slowest_s, ended = "", 0.0, set()
    for token in ids:
        live = [number for number in [*range(1, 65), 100] if number not in ended]
        began = time.thread_time()
        answers.handle(Tokens(ids=live, counts=[1] * len(live), tokens=pack_ids([token] * len(live))))
        deltas, stops = news(answers)
        slowest_s = max(slowest_s, time.thread_time() - began)
        said += text_of([delta for delta in deltas if delta.id == 100])
        ended |= {stop.id for stop in stops}
    assert said == smollm.decode(ids), "the other stream has everything"
    assert slowest_s < 0.1
    assert 100 not in ended
