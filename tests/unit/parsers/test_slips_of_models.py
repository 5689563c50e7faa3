"""What models write beside their formats' rules, and what a token limit leaves behind: at every cut of the stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from bough.parsers import REASONING_FORMATS, Parsed, Parser, ToolSpec, assemble, reasoning_parser, tool_parser

SPEC = ToolSpec("get", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
KIMI = "<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
CASES = [
    # Calls in Python's syntax stand behind text, and text in brackets stays text.
    ("pythonic", 'Sure! [get(city="Oslo")]', "Sure!", [{"city": "Oslo"}]),
    (
        "pythonic",
        'A [1] and [see (b)] first.\n\n[get(city="Oslo"), get(days=2)]',
        None,
        [{"city": "Oslo"}, {"days": 2}],
    ),
    ("pythonic", "I would use [get(city)] or [other(1)] here.", "I would use [get(city)] or [other(1)] here.", []),
    ("pythonic", "Pick [ge", "Pick [ge", []),
    # GLM's texts in quotes.
    (
        "glm45",
        '<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>"Oslo"</arg_value>\n</tool_call>',
        "",
        [{"city": "Oslo"}],
    ),
    ("glm45", '<tool_call>get<arg_key>days</arg_key><arg_value>"2"</arg_value></tool_call>', "", [{"days": 2}]),
    ("glm45", '<tool_call>get<arg_key>x</arg_key><arg_value>"a\\nb"</arg_value></tool_call>', "", [{"x": "a\nb"}]),
    (
        "glm45",
        '<tool_call>get<arg_key>city</arg_key><arg_value>"A" or "B"</arg_value></tool_call>',
        "",
        [{"city": '"A" or "B"'}],
    ),
    # Kimi's special tokens are never part of an answer.
    ("kimi_k2", "Well<|tool_call_end|> then.<|tool_calls_section_end|>", "Well then.", []),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>Nothing to call.", "Nothing to call.", []),
    ("kimi_k2", f"Ok. <|tool_calls_section_begin|>{KIMI}<|tool_call_end|><|tool_calls_section_end|>", "Ok.", [{}]),
    ("kimi_k2", "Hm <|tool_call_argument_begin|>so", "Hm so", []),
    ("kimi_k2", "Hm <|tool_calls_sec", "Hm ", []),
    # White space before a call is no content; anywhere else it is.
    ("hermes", 'Wait. \n\n<tool_call>{"name": "get", "arguments": {}}</tool_call>', "Wait.", [{}]),
    ("hermes", 'Wait. \n<tool_call>{"name": "get", "arguments": {}}</tool_call>\nDone. \n', "Wait.\nDone. \n", [{}]),
    ("hermes", "Wait. \n\nMore \n", "Wait. \n\nMore \n", []),
    # A closing mark that the token limit cut.
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_ca', "", [{}]),
    ("qwen3_coder", "<tool_call>\n<function=get>\n</function>\n</tool_c", "", [{}]),
    (
        "deepseekv31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁ca",
        "",
        [{}],
    ),
    ("hermes", "1 < 2 and a <", "1 < 2 and a <", []),
]


def cuts(text: str) -> list[Sequence[str]]:
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


def run(parser: Parser, pieces: Sequence[str]) -> Parsed:
    return assemble([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls(name: str, text: str, content: str | None, calls: list[dict[str, Any]]) -> None:
    for pieces in cuts(text):
        parsed = run(tool_parser(name, [SPEC]), pieces)
        assert [json.loads(call.arguments) for call in parsed.tool_calls if call.complete] == calls
        assert len(parsed.tool_calls) == len(calls)
        assert parsed.content == ("A [1] and [see (b)] first." if content is None else content)


WRAPPED = {"hunyuan", "ernie", "granite", "command-r"}
"""Formats with marks around the answer too: line breaks between two marks are none of either's."""


@pytest.mark.parametrize("name", sorted(set(REASONING_FORMATS) - WRAPPED - {"gpt-oss", "minimax-append-think"}))
def test_white_space_of_reasoning(name: str) -> None:
    """It is kept as the model wrote it, in the thoughts and in the answer."""
    format = REASONING_FORMATS[name]
    thoughts, answer = "\n  Hm.\n\n  So.  \n", "\n\n  Yes.\n"
    for pieces in cuts(f"{format.start}{format.label}{thoughts}{format.forced_end}{answer}"):
        parsed = run(reasoning_parser(name, force_reasoning=False), pieces)
        assert (parsed.reasoning, parsed.content) == (thoughts, answer)


@pytest.mark.parametrize("name", sorted(set(REASONING_FORMATS) - {"gpt-oss", "minimax-append-think"}))
def test_an_end_that_a_limit_cut_is_left_out(name: str) -> None:
    format = REASONING_FORMATS[name]
    for end in range(2, len(format.end)):
        for pieces in cuts(f"{format.start}{format.label}1 < 2{format.end[:end]}"):
            assert run(reasoning_parser(name, force_reasoning=False), pieces) == Parsed("", "1 < 2", [])
