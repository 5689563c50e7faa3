"""Tools: forced and strict calls are grammars that the grammar library takes, and that admit exactly the right calls."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from bough.core.errors import InvalidRequest
from bough.entrypoints.http.openai.schema import ChatRequest
from bough.entrypoints.http.openai.tools import RequestTools, describe, offer
from bough.parsers import TOOL_FORMATS, parse_tool_calls

xgrammar = pytest.importorskip("xgrammar")

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


def offered(parser: str | None, **fields: Any) -> RequestTools:
    return offer(msgspec.convert({"messages": [], "tools": TOOLS, **fields}, ChatRequest), parser)


def accepts(structural_tag: str, text: str) -> bool:
    """Whether the grammar takes the text as a whole answer."""
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(structural_tag)
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(256)


@pytest.mark.parametrize("parser", [None, *TOOL_FORMATS])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}, "auto"])
def test_every_format_makes_a_grammar(parser: str | None, choice: Any) -> None:
    made = offered(parser, tool_choice=choice)
    if made.structural_tag:
        xgrammar.Grammar.from_structural_tag(made.structural_tag)
    assert made.structural_tag or choice == "auto"
    assert made.forced is (choice != "auto")


def test_a_forced_call_must_fit_its_schema() -> None:
    made = offered("hermes", tool_choice="required")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert accepts(made.structural_tag, call)
    assert accepts(made.structural_tag, f"{call}\n{call}")
    assert not accepts(made.structural_tag, call.replace("1", '"x"'))
    assert not accepts(made.structural_tag, "I would rather talk.")
    assert not accepts(made.structural_tag, call.replace("add", "sub"))
    parsed = parse_tool_calls(call, made.source, made.parser or "")
    assert [(each.name, json.loads(each.arguments)) for each in parsed.tool_calls] == [("add", {"a": 1})]


def test_a_named_call_is_the_only_one() -> None:
    made = offered("hermes", tool_choice={"type": "function", "function": {"name": "now"}})
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(made.structural_tag, call)
    assert not accepts(made.structural_tag, f"{call}\n{call}")
    assert not accepts(made.structural_tag, call.replace("now", "add"))


def test_strict_tools_leave_the_text_free_but_not_the_call() -> None:
    made = offered("hermes")
    assert accepts(made.structural_tag, "Just talking.")
    assert accepts(made.structural_tag, 'Look: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    assert not accepts(made.structural_tag, '<tool_call>\n{"name": "add", "arguments": {"b": 1}}\n</tool_call>')


def test_calls_that_a_format_cannot_write_are_forced_in_another() -> None:
    """Python has no argument of that name."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a-b": {}}}, "strict": True}}]
    assert offered("pythonic", tool_choice="required", tools=tools).parser == "hermes"
    assert offered("pythonic", tool_choice="required").parser == "pythonic"
    free = offered("pythonic", tools=tools)
    assert (free.parser, free.structural_tag) == ("pythonic", "")


def test_no_tools_no_offer() -> None:
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        made = offered("hermes", **fields)
        assert made.tools == []
        assert made.parser is None


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(InvalidRequest, match="nested"):
        offered("hermes", tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])


@pytest.mark.parametrize("kind", ["string", "array", "integer", ["string", "null"], None])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_arguments_that_are_no_object_are_refused(kind: Any, choice: Any) -> None:
    tools = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    with pytest.raises(InvalidRequest) as refused:
        offered("hermes", tools=tools, tool_choice=choice)
    assert refused.value.param == "tools[1].function.parameters"


def test_arguments_need_not_say_that_they_are_an_object() -> None:
    for schema in ({}, {"properties": {"a": {"type": "integer"}}}, {"type": ["object", "null"]}):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert offered("hermes", tools=[tool]).tools


def test_the_description_names_every_tool() -> None:
    text = describe(offered("hermes").tools)
    assert '"add"' in text
    assert '"now"' in text
    assert "<tool_call>" in text
