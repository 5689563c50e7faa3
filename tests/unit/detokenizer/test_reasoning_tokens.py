"""The tokens of the reasoning are those before its end mark, wherever the answer is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from bough.core.messages import Began, Delta, Deltas, End, RowOutput, TextSpec, Tokens, pack_ids, unpack_ids
from bough.core.reasoning import reasoning_of
from bough.detokenizer.process import Answers
from bough.engine_client.beams import spoken
from bough.engine_client.request import Request
from bough.parsers import REASONING_FORMATS, Parsed, ResponseParser, assemble
from bough.tokenizer import Tokenizer

AHEAD = 4
"""Tokens that the engine makes before it hears of a stop."""


def end_of(answers: Answers) -> End:
    deltas = [each for message in answers.take()[0][0] if isinstance(message, Deltas) for each in message.deltas]
    (end,) = [delta.end for delta in deltas if delta.end is not None]
    return end


def told(tokenizer: Tokenizer, ids: list[int], mark: tuple[int, ...], cut: int, how: str, spec: dict[str, Any]) -> End:
    """The end of an answer of `cut` tokens, as the detokenizer tells it. A stop string takes all but the start mark."""
    stops = how.startswith("stop")
    made = ids[: cut + AHEAD] if how == "stop, heard late" else ids[:cut]
    stop = tokenizer.decode(ids[:cut], False).removeprefix("<think>")
    text = TextSpec(stop=(stop,) if stops else (), **spec)
    counted, whole = reasoning_of(unpack_ids(pack_ids(made)), mark, opened=text.reasoning_forced)
    end = End(reason="length", completion_tokens=len(made), reasoning_tokens=counted, reasoning_mark=whole)
    answers = Answers(tokenizer)
    answers.handle(Began(id=1, rid="r", text=text))
    if how == "token by token":
        for token in made[:-1]:
            answers.handle(Tokens(ids=[1], counts=[1], tokens=pack_ids([token]), rows={}))
        made = made[-1:]
    answers.handle(Tokens(ids=[1], counts=[len(made)], tokens=pack_ids(made), rows={0: RowOutput(end=end)}))
    return end_of(answers)


@pytest.mark.parametrize("how", ["length", "token by token", "stop", "stop, heard late"])
@pytest.mark.parametrize("opened", [True, False])
def test_wherever_the_answer_is_cut(smollm: Tokenizer, opened: bool, how: str) -> None:
    mark = tuple(smollm.encode("</think>", add_special_tokens=False))
    assert len(mark) > 2, "the mark is one that can be cut"
    start = [] if opened else smollm.encode("<think>", add_special_tokens=False)
    before = [*start, *smollm.encode("so two and two", add_special_tokens=False)]
    ids = [*before, *mark, *smollm.encode("four of them", add_special_tokens=False)]
    spec = {"reasoning_parser": "qwen3", "reasoning_forced": opened}
    for cut in range(len(start) + 1, len(ids) + 1):
        end = told(smollm, ids, mark, cut, how, spec)
        wanted = cut if cut < len(before) + len(mark) else len(before)
        assert (end.completion_tokens, end.reasoning_tokens) == (cut, wanted), smollm.decode(ids[:cut])


@pytest.mark.parametrize("how", ["length", "stop", "stop, heard late"])
def test_without_a_parser_ids_decide(smollm: Tokenizer, how: str) -> None:
    mark = tuple(smollm.encode("</think>", add_special_tokens=False))
    before = smollm.encode("so two and two", add_special_tokens=False)
    ids = [*before, *mark, *smollm.encode("four of them", add_special_tokens=False)]
    for cut in range(1, len(ids) + 1):
        end = told(smollm, ids, mark, cut, how, {"reasoning_forced": True})
        assert end.reasoning_tokens == (cut if cut < len(before) + len(mark) else len(before))


@pytest.mark.parametrize("how", ["length", "token by token"])
def test_sections_that_end_without_the_usual_ids(smollm: Tokenizer, how: str) -> None:
    """A call that ends the section, a mark spelled in other tokens, an answer that never reasons."""
    mark = tuple(smollm.encode("</think>", add_special_tokens=False))
    letters = [smollm.encode(letter, add_special_tokens=False)[0] for letter in "</think>"]
    thought = smollm.encode("so two and two", add_special_tokens=False)
    call = smollm.encode('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', add_special_tokens=False)
    answer = smollm.encode("four", add_special_tokens=False)
    tools = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
    for opened, ids, least, most in (
        (True, [*thought, *call], len(thought), len(thought) + 4),
        (True, [*thought, *letters, *answer], len(thought), len(thought) + len(letters)),
        (False, answer, 0, 0),
    ):
        spec = {"reasoning_parser": "qwen3", "reasoning_forced": opened, "tool_parser": "hermes", "tools": tools}
        assert least <= told(smollm, ids, mark, len(ids), how, spec).reasoning_tokens <= most


@pytest.mark.parametrize("how", ["length", "token by token", "stop", "stop, heard late"])
def test_answers_that_do_not_reason_may_speak_of_the_mark(smollm: Tokenizer, how: str) -> None:
    mark = tuple(smollm.encode("</think>", add_special_tokens=False))
    ids = [
        *smollm.encode("It ends with", add_special_tokens=False),
        *mark,
        *smollm.encode("then", add_special_tokens=False),
    ]
    for cut in range(1, len(ids) + 1):
        end = told(smollm, ids, mark, cut, how, {"reasoning_parser": "qwen3"})
        assert (end.completion_tokens, end.reasoning_tokens) == (cut, 0)


@pytest.mark.parametrize("opened", [True, False])
def test_beams_count_alike(smollm: Tokenizer, opened: bool) -> None:
    mark = tuple(smollm.encode("</think>", add_special_tokens=False))
    start = [] if opened else smollm.encode("<think>", add_special_tokens=False)
    before = [*start, *smollm.encode("so two", add_special_tokens=False)]
    ids = [*before, *mark, *smollm.encode("four", add_special_tokens=False)]
    prompt = unpack_ids(pack_ids(smollm.encode("two and two?")))
    request = Request(prompt=prompt, reasoning_end=mark, reasoning_forced=opened)
    for cut in range(len(start) + 1, len(ids) + 1):
        delta = Delta(id=1, tokens=pack_ids(ids[:cut]), end=End(reason="length", completion_tokens=cut))
        spec = {"reasoning_parser": "qwen3", "reasoning_forced": opened}
        end = spoken(delta, request, prompt, smollm, TextSpec(**spec)).end
        assert end is not None
        assert end.reasoning_tokens == told(smollm, ids, mark, cut, "length", spec).reasoning_tokens


def read(tokenizer: Tokenizer, ids: list[int], spec: TextSpec, at_once: int) -> tuple[Parsed, int, int]:
    """What is told of an answer whose tokens come so many at once, its reasoning tokens, and the number of events."""
    answers = Answers(tokenizer)
    answers.handle(Began(id=1, rid="r", text=spec))
    for start in range(0, len(ids), at_once):
        part = ids[start : start + at_once]
        end = End(reason="length", completion_tokens=len(ids)) if start + at_once >= len(ids) else None
        rows = {0: RowOutput(end=end)} if end is not None else {}
        answers.handle(Tokens(ids=[1], counts=[len(part)], tokens=pack_ids(part), rows=rows))
    deltas = [each for message in answers.take()[0][0] if isinstance(message, Deltas) for each in message.deltas]
    events = [event for delta in deltas for event in delta.events]
    (counted,) = [delta.end.reasoning_tokens for delta in deltas if delta.end is not None]
    return assemble(events), counted, len(events)


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_tokens_that_come_together_count_as_alone(smollm: Tokenizer, name: str) -> None:
    marks = ResponseParser.named(reasoning=name).markers
    assert all(marks)
    words = [*marks, *marks, "so", " two", "\n", "a > b", "<", "thought\n", "analysis", "é"]
    rng = random.Random(name)
    for _ in range(4):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(1, 12)))
        ids = smollm.encode(text, add_special_tokens=False)
        spec = TextSpec(reasoning_parser=name, reasoning_forced=rng.random() < 0.5)
        alone = read(smollm, ids, spec, 1)[:2]
        assert read(smollm, ids, spec, 3)[:2] == read(smollm, ids, spec, len(ids))[:2] == alone, text


def test_a_long_answer_at_once_is_told_in_few_events(smollm: Tokenizer) -> None:
    ids = smollm.encode("so two and two\n" * 500 + "</think>" + "are four, of course. " * 500, add_special_tokens=False)
    spec = TextSpec(reasoning_parser="qwen3", reasoning_forced=True, every=2**31 - 1)
    parsed, counted, num_events = read(smollm, ids, spec, len(ids))
    assert parsed.reasoning.count("two and two") == parsed.content.count("of course") == 500
    assert counted > 1000
    assert num_events < 10
