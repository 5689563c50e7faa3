"""What holds for every parser, whatever the text and however it is cut."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from bough.core.messages import Content, Reasoning, ToolCallArguments, ToolCallBegin, ToolCallEnd
from bough.parsers import REASONING_FORMATS, TOOL_FORMATS, ResponseParser, assemble, reasoning_parser, tool_parser

TOOL_NAMES = sorted(TOOL_FORMATS)
REASONING_NAMES = sorted(REASONING_FORMATS)
DROPPING = {"gpt-oss", *(name for name in TOOL_NAMES if getattr(TOOL_FORMATS[name].make, "never_content", ()))}
"""Formats with special tokens that are dropped even where no call is made."""
SEPARATING = [name for name in REASONING_NAMES if not REASONING_FORMATS[name].stays_content]
ODDS_AND_ENDS = [
    *"{}[]()<>\"'`,:;=\\/|\n\r\t #-.0159aeu｜▁◁",
    '"name": ',
    '"arguments": ',
    '"parameters": ',
    '{"name": "search", "arguments": {',
    '{"name": "get_time", "parameters": {}}',
    '"search"',
    "search",
    "get_time",
    "function",
    "functions.search:0",
    'name="search">',
    'name="query"',
    "<parameter=query>",
    "[get_time()",
    "true",
    "None",
    "-1.5e3",
    '{"query": "x\\n"}',
    '\\u00e9"',
    "```json\n",
    " to=functions.search",
    "analysis",
    "commentary",
    "é日🎉",
    "\x00\x1f",
    "word ",
    "    ",
    "\n\n",
]


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12), label="cuts"))
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def texts_for(markers: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Texts made of the format's own parts, whole and broken off, and of noise."""
    parts = st.one_of(
        st.sampled_from(ODDS_AND_ENDS),
        st.sampled_from(markers),
        st.sampled_from(markers).flatmap(lambda m: st.integers(1, len(m)).map(lambda n: m[:n])),
        st.text(max_size=4),
    )
    return st.lists(parts, max_size=24).map("".join)


def check_events(events: list[Any], text: str) -> None:
    """Calls are numbered without gaps; a call's events come together; whole arguments are JSON objects."""
    open_call: int | None = None
    begun = 0
    arguments: dict[int, str] = {}
    for event in events:
        match event:
            case ToolCallBegin(index, id, name):
                assert index == begun
                assert id
                assert name
                begun += 1
                open_call = index
                arguments[index] = ""
            case ToolCallArguments(index, delta):
                assert index == open_call
                assert delta
                arguments[index] += delta
            case ToolCallEnd(index):
                assert index == open_call
                open_call = None
                assert isinstance(json.loads(arguments[index]), dict)
            case Content(piece) | Reasoning(piece):
                assert piece
    if begun == 0:
        assert "".join(event.text for event in events if isinstance(event, Content)) == text


@pytest.mark.parametrize("name", TOOL_NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_text_any_cut_tools(name: str, data: st.DataObject, new_tool_parser: Any, run_pieces: Any) -> None:
    text = data.draw(texts_for(new_tool_parser(name).markers), label="text")
    whole = run_pieces(new_tool_parser(name), [text])
    keeps_all = name not in DROPPING
    if keeps_all:
        check_events(whole, text)
    characters = run_pieces(new_tool_parser(name), list(text))
    assert assemble(characters) == assemble(whole)
    assert assemble(run_pieces(new_tool_parser(name), pieces_of(text, data))) == assemble(whole)
    if keeps_all:
        check_events(characters, text)


@pytest.mark.parametrize("name", REASONING_NAMES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_text_any_cut_reasoning(name: str, data: st.DataObject, run_pieces: Any) -> None:
    forced = data.draw(st.sampled_from([None, True, False]), label="force_reasoning")
    streamed = data.draw(st.booleans(), label="stream_reasoning")

    def new() -> Any:
        return reasoning_parser(name, force_reasoning=forced, stream_reasoning=streamed)

    text = data.draw(texts_for(new().markers), label="text")
    whole = assemble(run_pieces(new(), [text]))
    assert assemble(run_pieces(new(), list(text))) == whole
    assert assemble(run_pieces(new(), pieces_of(text, data))) == whole
    shown = new().markers
    format = REASONING_FORMATS[name]
    if not any(marker in text for marker in shown) and not format.harmony and not format.stays_content:
        inside = format.starts_inside if forced is None else forced
        kept = whole.reasoning if inside else whole.content
        begin = text.find(kept)
        end = begin + len(kept)
        assert not text[:begin].strip(format.trim)
        assert any(marker.startswith(text[end:].lstrip(format.trim)) for marker in shown)  # one that was cut


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_any_cut_composed(data: st.DataObject, offered: Any, run_pieces: Any) -> None:
    reasoning = data.draw(st.sampled_from([None, *REASONING_NAMES]), label="reasoning")
    tools = data.draw(st.sampled_from([None, *TOOL_NAMES]), label="tools")

    def new() -> ResponseParser:
        return ResponseParser.named(
            reasoning=reasoning, tools=tools, tool_list=offered, new_id=iter(map(str, range(99))).__next__
        )

    text = data.draw(texts_for(new().markers or ("<think>",)), label="text")
    whole = assemble(run_pieces(new(), [text]))
    assert assemble(run_pieces(new(), list(text))) == whole
    assert assemble(run_pieces(new(), pieces_of(text, data))) == whole


def test_samples_cut_at_random(tool_samples: list[dict[str, Any]], new_tool_parser: Any, parse_pieces: Any) -> None:
    """Several tokens at a time, as speculative steps deliver them."""
    rng = random.Random(7)
    for sample in tool_samples:
        name, text = sample["parser"], sample["text"]
        whole = parse_pieces(new_tool_parser(name), [text])
        for longest in (3, 9, 40):
            pieces, at = [], 0
            while at < len(text):
                step = rng.randint(1, longest)
                pieces.append(text[at : at + step])
                at += step
            assert parse_pieces(new_tool_parser(name), pieces) == whole


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_two_samples_in_one_answer(name: str, tool_samples: list[dict[str, Any]], new_tool_parser: Any) -> None:
    """What follows a call, whole or broken, is read as if the call had not been there."""
    if name in ("llama3", "pythonic", "gpt-oss"):  # whose calls need the start of the answer, or of a message
        return
    good = next(
        s for s in tool_samples if s["parser"] == name and s["name"] == "two calls, the second without arguments"
    )
    for sample in tool_samples:
        if sample["parser"] != name or "cut" in sample or sample["name"].startswith("stopped"):
            continue
        parser = new_tool_parser(name)
        parsed = assemble([*parser.feed(sample["text"] + " and " + good["text"]), *parser.finish()])
        assert [c.name for c in parsed.tool_calls] == [c["name"] for c in sample["calls"] + good["calls"]]
        assert parsed.content.split() == (sample["content"] + " and ").split()


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_plain_text_is_told_at_once(name: str) -> None:
    """Only a suffix that may become a marker waits, and white space before it, which may belong to a call."""
    parser = tool_parser(name)
    starts = [m for m in parser.markers if m[0] in "<["]
    told = ""
    text = "Well, a < b and c[0] <to be> sure <| or [T <tool"
    for i, char in enumerate(text):
        told += "".join(event.text for event in parser.feed(char) if isinstance(event, Content))
        waiting = text[len(told) : i + 1]
        assert told + waiting == text[: i + 1]
        waiting = waiting.lstrip()
        assert waiting == "" or any(marker.startswith(waiting) for marker in (*parser.markers, *starts))


@pytest.mark.parametrize("name", SEPARATING)
def test_plain_reasoning_is_told_at_once(name: str) -> None:
    format = REASONING_FORMATS[name]
    parser = reasoning_parser(name, force_reasoning=False)
    opening = format.start + format.label
    assert parser.feed(opening) == []
    told = ""
    text = "Well, a < b and c[0] </to be> sure <| or ◁ not"
    for i, char in enumerate(text):
        told += "".join(event.text for event in parser.feed(char) if isinstance(event, Reasoning))
        assert parser.in_reasoning
        waiting = text[len(told) : i + 1]
        assert waiting == "" or any(marker.startswith(waiting.lstrip()) for marker in parser.markers)


def test_arguments_stream_before_they_are_whole(tool_samples: list[dict[str, Any]], new_tool_parser: Any) -> None:
    """JSON and string arguments are passed on piece by piece (lists of Python calls are told call by call)."""
    for sample in tool_samples:
        if sample["name"] != "quotes, backslashes, line breaks, many scripts":
            continue
        if sample["parser"] in ("pythonic", "lfm2"):
            continue
        parser = new_tool_parser(sample["parser"])
        deltas = [
            event for char in sample["text"] for event in parser.feed(char) if isinstance(event, ToolCallArguments)
        ]
        assert len(deltas) > 20
