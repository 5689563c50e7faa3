"""Tools of a Responses body as the chat route's functions, and the calls of these functions as the client's own items.

Functions stay as they are. A `custom` tool takes text instead of JSON: it becomes a function with one string argument, which
is held to the tool's grammar if it has one. A `namespace` is flattened: its functions carry its name in theirs. Tools that
OpenAI's service runs itself (`web_search`, ...) don't exist here: they are left out, and the answer's header says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.entrypoints.http.openai.fields import bad_field
from bough.entrypoints.http.openai.schema import FunctionDefinition, NamedFunction, NamedTool, Tool
from bough.entrypoints.http.responses.schema import Json
from bough.grammar.relax import relax

HOSTED = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
    "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
})  # fmt: skip
"""Types of tools that OpenAI's service runs, or that its own models know without a schema."""

_TEXT = "input"
"""The argument of a custom tool."""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of one request, and what they are called on either side."""

    functions: list[Tool] = field(default_factory=list)
    custom: frozenset[str] = frozenset()
    """Names of functions that stand for custom tools."""
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Flat names, and what they stand for: a namespace and a name in it."""
    left_out: tuple[str, ...] = ()
    """Tools that were left out, for the header."""

    def named(self, item: Json) -> str | None:
        """The function that a call item of the client's is about; None: it names none."""
        name, space = item.get("name"), item.get("namespace")
        if not isinstance(name, str):
            return None
        return flat_name(space, name) if isinstance(space, str) and space else name

    def call_item(self, call_id: str, name: str) -> Json:
        """The beginning of the item that tells of a call, without its arguments."""
        is_custom = name in self.custom
        item: Json = {"type": "custom_tool_call" if is_custom else "function_call", "call_id": call_id, "name": name}
        item["input" if is_custom else "arguments"] = ""
        if name in self.namespaced:
            item["namespace"], item["name"] = self.namespaced[name]
        return item


def flat_name(namespace: str, name: str) -> str:
    """A function of a namespace, as the model sees it."""
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def text_argument(arguments: str) -> str:
    """What a custom tool gets: the text in the function's arguments, or these as they stand if they hold none."""
    try:
        given = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = given.get(_TEXT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def as_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return msgspec.json.encode({_TEXT: text}).decode()


def all_tools(tools: Sequence[Json] | None, items: Sequence[Json]) -> list[Json]:
    """The tools of a body, and those that items of the conversation (`additional_tools`) add. Of two that are the same, one.
    Raises `InvalidRequest`."""
    found = list(tools or ())
    for at, item in enumerate(items):
        if item.get("type") == "additional_tools":
            found += [tool for tool in _members(item, f"input[{at}]") if tool not in found]
    return found


def offered_tools(tools: Sequence[Json], *, strict: bool = False) -> OfferedTools:
    """The tools that a body offers. `strict`: one that would be left out is refused. Raises `InvalidRequest`."""
    bounds.count("tools", tools, "tools")
    functions: list[Tool] = []
    custom: set[str] = set()
    namespaced: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        kind = tool.get("type")
        if kind == "function":
            functions.append(_function(tool, where))
        elif kind == "custom":
            functions.append(_custom(tool, where))
            custom.add(functions[-1].function.name)
        elif kind == "namespace":
            space = _name(tool, where)
            for inner, member in enumerate(_members(tool, where)):
                place = f"{where}.tools[{inner}]"
                made = _custom(member, place) if member.get("type") == "custom" else _function(member, place)
                own = made.function.name
                made.function.name = flat_name(space, own)
                functions.append(made)
                namespaced[made.function.name] = (space, own)
                if member.get("type") == "custom":
                    custom.add(made.function.name)
        elif kind in HOSTED and not strict:
            left_out.append(f"tools[{at}]:{kind}")
        else:
            raise InvalidRequest(
                what=f"{where}.type is {str(kind)[:50]!r}",
                why="this server has no tools of its own",
                fix="send tools of type function, custom or namespace",
                param=f"{where}.type",
            )
    bounds.count("tools", functions, "tools")
    return OfferedTools(functions, frozenset(custom), namespaced, tuple(left_out))


def tool_choice(choice: str | Json | None, offered: OfferedTools) -> tuple[Any, frozenset[str] | None]:
    """`tool_choice` as the chat route knows it, and the names it leaves of the tools (None: all)."""
    match choice:
        case None | "none" | "auto" | "required":
            return choice, None
        case {"type": "function" | "custom", "name": str(name)}:
            namespace = choice.get("namespace") if isinstance(choice, dict) else None
            named = offered.named({"name": name, "namespace": namespace})
            return NamedTool(function=NamedFunction(name=named or name)), None
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            given = [offered.named(tool) for tool in tools if isinstance(tool, dict)]
            return mode, frozenset(name for name in given if name)
        case _:
            raise bad_field(
                "tool_choice is not known",
                "it must be none, auto, required, a function or custom tool by name, or allowed_tools",
                "tool_choice",
            )


def _name(tool: Json, where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise bad_field(f"{where}.name is missing", "a tool has a name", f"{where}.name")
    return name


def _members(group: Json, where: str) -> list[Json]:
    members = group.get("tools")
    if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
        raise bad_field(f"{where}.tools is no list of tools", "it adds tools", f"{where}.tools")
    return members


def _function(tool: Json, where: str) -> Tool:
    name, about, schema = _name(tool, where), tool.get("description"), tool.get("parameters")
    if not isinstance(about, str | None) or not isinstance(schema, dict | None):
        raise bad_field(f"{where} has the wrong types", "description is text, parameters an object", where)
    strict = tool.get("strict") is True
    return Tool(function=FunctionDefinition(name=name, description=about, parameters=schema, strict=strict))


def _custom(tool: Json, where: str) -> Tool:
    name, about, form = _name(tool, where), tool.get("description"), tool.get("format")
    if not isinstance(about, str | None) or not isinstance(form, dict | None):
        raise bad_field(f"{where} has the wrong types", "description is text, format an object", where)
    what: Json = {"type": "string"}
    definition = form.get("definition") if form is not None and form.get("type") == "grammar" else None
    if form is not None and isinstance(definition, str):
        what |= _language(definition, form.get("syntax"))
    schema = {"type": "object", "properties": {_TEXT: what}, "required": [_TEXT], "additionalProperties": False}
    strict = "pattern" in what or "x-grammar" in what
    return Tool(function=FunctionDefinition(name=name, description=about, parameters=schema, strict=strict))


def _language(definition: str, syntax: object) -> Json:
    """A text's schema by the grammar (`lark` or `regex`) of a custom tool. One that can't be followed is shown to the model,
    for OpenAI's own service takes more than can be."""
    keyword, source = ("pattern", f"^(?:{definition})$") if syntax == "regex" else ("x-grammar", definition)
    readable, _ = relax({"type": "string", keyword: source}, strict=False)
    if keyword in readable:
        return {keyword: source}
    return {"description": f"Text in the language of this grammar:\n{definition}"}
