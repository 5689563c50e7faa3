"""Tools: which of them are offered, how calls are forced or constrained, and how a model without tool training sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.entrypoints.http.openai.relaxed import relax_tools
from bough.entrypoints.http.openai.schema import AllowedNames, AllowedTools, ChatRequest, NamedFunction, NamedTool, Tool
from bough.parsers import ToolCallFormat, ToolSpec, call_format

Json = dict[str, Any]

FALLBACK_PARSER = "hermes"
"""Format for models whose own is unknown, or can't be enforced by a grammar."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTools:
    """The tools of one request."""

    tools: list[Json]
    """As templates expect them; empty: the model is offered none."""
    parser: str | None
    """Format that calls are read in."""
    structural_tag: str = ""
    """Constraint on the answer; empty: none."""
    forced: bool = False
    """The answer consists of calls only."""
    at_most_one: bool = False
    ignored: tuple[str, ...] = ()
    """What is not enforced: fields that do not apply to a forced call, parts of schemas."""

    @property
    def source(self) -> str:
        """JSON list of the tools, for parsers that type arguments by schema."""
        return _encode(self.tools).decode() if self.tools else ""


NO_TOOLS = RequestTools(tools=[], parser=None)


def adopt_functions(body: ChatRequest) -> None:
    """Turns the older `functions` and `function_call` of a body into tools and a choice among them. Raises
    `InvalidRequest` if it has both the older and the newer fields."""
    if body.functions is None and body.function_call is None:
        return
    if body.tools is not None or body.tool_choice is not None:
        raise InvalidRequest(
            what="functions or function_call beside tools or tool_choice",
            why="they are an older and a newer way to offer the same",
            fix="send tools and tool_choice only",
            param="functions" if body.functions is not None else "function_call",
        )
    body.tools = [Tool(function=each) for each in body.functions or ()] or None
    choice = body.function_call
    body.tool_choice = NamedTool(function=choice) if isinstance(choice, NamedFunction) else choice
    body.parallel_tool_calls = False  # a message of that kind holds one call


def offer(body: ChatRequest, parser: str | None) -> RequestTools:
    """Evaluates the body's `tools` and `tool_choice`. `parser`: the format of the served model, if known."""
    tools = body.tools or []
    bounds.count("tools", tools, "tools")
    given = body.tool_choice
    if isinstance(given, AllowedTools):
        tools = _allowed(tools, given.allowed_tools)
        given = given.allowed_tools.mode
    choice = given if given is not None else ("auto" if tools else "none")
    if choice != "none" and not tools:
        if given in (None, "auto"):
            return NO_TOOLS
        raise InvalidRequest(
            what="tool_choice asks for a call, but there are no tools",
            why="a call needs something to call",
            fix="send tools, or leave tool_choice out",
            param="tool_choice",
        )
    if choice == "none" or not tools:
        return NO_TOOLS
    _check_names(tools)
    _check_parameters(tools)
    shown: list[Json] = [{"type": "function", "function": _function(tool)} for tool in tools]
    tools, relaxed = relax_tools(tools)
    bounds.at_most("tools_bytes", len(_encode(shown)), "tools")
    one = body.parallel_tool_calls is False
    name = parser or FALLBACK_PARSER
    if choice == "auto":
        strict = [tool for tool in tools if tool.function.strict]
        tag = _constrained_tag(name, strict, only_one=one) if strict else ""
        ignored = relaxed if strict else ()
        return RequestTools(tools=shown, parser=name, structural_tag=tag, at_most_one=one, ignored=ignored)
    wanted = tools if choice == "required" else [_named(tools, choice)]
    form = call_format(name, _specs(wanted))
    if form is None:
        name = FALLBACK_PARSER
        form = call_format(name, _specs(wanted))
    if form is None:
        raise AssertionError("the fallback format can be written by a grammar")
    one = one or isinstance(choice, NamedTool)
    tag = _forced_tag(form, only_one=one)
    return RequestTools(tools=shown, parser=name, structural_tag=tag, forced=True, at_most_one=one, ignored=relaxed)


def describe(tools: Sequence[Json]) -> str:
    """Tools as text for the system message of a model whose template has no place for them."""
    lines = "\n".join(_encode(tool).decode() for tool in tools)
    return (
        "You can call functions. Each line between <tools> and </tools> describes one:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write nothing but a JSON object with its name and arguments between tags:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for at, tool in enumerate(tools):
        name = tool.function.name
        if not name or len(name) > 128 or not all(each.isalnum() or each in "_-." for each in name):
            raise InvalidRequest(
                what=f"tools[{at}].function.name is not a name",
                why="names have 1 to 128 letters, digits, underscores, dots and hyphens",
                fix="rename the function",
                param=f"tools[{at}].function.name",
            )
        if name in seen:
            raise InvalidRequest(
                what=f"two tools are called {name}",
                why="a call of one could not be distinguished from a call of the other",
                fix="rename one of them",
                param=f"tools[{at}].function.name",
            )
        seen.add(name)


def _check_parameters(tools: Sequence[Tool]) -> None:
    """Arguments are an object in every format: a call with others could be generated, but not read back."""
    for at, tool in enumerate(tools):
        given = (tool.function.parameters or {}).get("type", "object")
        if given != "object" and not (isinstance(given, list) and "object" in given):
            raise InvalidRequest(
                what=f"tools[{at}].function.parameters is of type {str(given)[:50]!r}",
                why="a call's arguments are a JSON object",
                fix='send a schema of "type": "object", with the value as one of its properties',
                param=f"tools[{at}].function.parameters",
            )


def _allowed(tools: Sequence[Tool], allowed: AllowedNames) -> list[Tool]:
    """The tools that `allowed_tools` leaves. Raises `InvalidRequest` for one that is not there."""
    names = {each.function.name: None for each in allowed.tools}
    known = {tool.function.name for tool in tools}
    for name in names:
        if name not in known:
            raise _no_such_tool(tools, name)
    return [tool for tool in tools if tool.function.name in names]


def _named(tools: Sequence[Tool], choice: object) -> Tool:
    wanted = choice.function.name if isinstance(choice, NamedTool) else ""
    for tool in tools:
        if tool.function.name == wanted:
            return tool
    raise _no_such_tool(tools, wanted)


def _no_such_tool(tools: Sequence[Tool], wanted: str) -> InvalidRequest:
    return InvalidRequest(
        what=f"tool_choice names {wanted[:100]!r}, which is not among the tools",
        why=f"the tools are: {', '.join(tool.function.name for tool in tools)[:500]}",
        fix="name one of them",
        param="tool_choice",
    )


def _function(tool: Tool) -> Json:
    function = tool.function
    shown: Json = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
    bounds.depth(shown["parameters"], "schema_depth", "tools")
    return shown


def _specs(tools: Sequence[Tool]) -> list[ToolSpec]:
    return [ToolSpec(tool.function.name, _schema(tool)) for tool in tools]


def _schema(tool: Tool) -> Json:
    """The arguments' schema: always an object's, since that is what calls carry."""
    given = tool.function.parameters or {}
    return given if given.get("type") == "object" or not given else {"type": "object", **given}


def _tags(form: ToolCallFormat) -> list[Json]:
    return [{"type": "tag", "begin": call.begin, "content": call.content, "end": call.end} for call in form.calls]


def _calls(form: ToolCallFormat, *, only_one: bool) -> Json:
    """One call or several, between the section's markers."""
    inner: Json = {
        "type": "tags_with_separator",
        "tags": _tags(form),
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
    if not form.section_begin and not form.section_end:
        return inner
    begin = {"type": "const_string", "value": form.section_begin}
    end = {"type": "const_string", "value": form.section_end}
    elements = [each for each in (begin, inner, end) if each.get("value", " ")]
    return {"type": "sequence", "elements": elements}


def _forced_tag(form: ToolCallFormat, *, only_one: bool) -> str:
    return _encode({"type": "structural_tag", "format": _calls(form, only_one=only_one)}).decode()


def _constrained_tag(parser: str, tools: Sequence[Tool], *, only_one: bool) -> str:
    """Free text, but a call that the model starts must fit its tool's schema. Empty where the format can't be written."""
    form = call_format(parser, _specs(tools))
    if form is None:
        return ""
    if form.is_bare:
        return _constrained_list(form, only_one=only_one)
    tags = _tags(form)
    if form.section_begin:
        content = _calls(msgspec.structs.replace(form, section_begin="", section_end=""), only_one=only_one)
        tags = [{"type": "tag", "begin": form.section_begin, "content": content, "end": form.section_end}]
    return _triggered(form.triggers, tags, only_one=only_one)


def _constrained_list(form: ToolCallFormat, *, only_one: bool) -> str:
    """As above, for formats in which only the first call distinguishes a list of calls from free text."""
    further = [{**tag, "begin": form.separator + tag["begin"]} for tag in _tags(form)]
    more = {"type": "tags_with_separator", "tags": further, "separator": "", "at_least_one": False}
    tags, triggers = [], []
    for call in form.calls:
        elements = [call.content, {"type": "const_string", "value": call.end}, *([] if only_one else [more])]
        triggers.append(begin := form.section_begin + call.begin)
        content = {"type": "sequence", "elements": elements}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": form.section_end})
    return _triggered(triggers, tags, only_one=only_one)


def _triggered(triggers: list[str], tags: list[Json], *, only_one: bool) -> str:
    format = {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": only_one,
    }
    return _encode({"type": "structural_tag", "format": format}).decode()
