"""Tool-call formats for grammars: with JSON arguments, with markup around each argument, or as Python calls."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from typing import Any

import msgspec

from bough.parsers.events import ToolSpec
from bough.parsers.typing_by_schema import encode_text

Json = dict[str, Any]
_SHARED = ("$defs", "definitions")
_LIMITS = ("pattern", "format", "minLength", "maxLength", "x-grammar")
_JSON_TYPES = ("integer", "number", "boolean", "array", "object", "null")


class CallTag(msgspec.Struct, frozen=True):
    """How a call of one tool is written: `begin`, arguments that fit `schema`, `end`."""

    name: str
    begin: str
    end: str
    schema: Json
    content: Json
    """The arguments, as a format of a structural tag."""


class ToolCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What a grammar needs to force calls, or to constrain those the model starts.

    Forced: `section_begin call (separator call)* section_end`, each call one of `calls`.
    Constrained: free text until one of `triggers` (all calls and the section begin with one), then as above.
    """

    calls: list[CallTag]
    triggers: list[str]
    section_begin: str = ""
    separator: str = ""
    section_end: str = ""
    is_bare: bool = False
    """The section has no marker: in free text it is recognised only together with the first call, and there are no
    triggers."""


class CallShape(msgspec.Struct, frozen=True, kw_only=True):
    """A ToolCallFormat with `NAME` where the tool's name goes (in a trigger: one for each tool). The arguments are a JSON
    object."""

    begin: str
    end: str
    triggers: tuple[str, ...]
    section_begin: str = ""
    separator: str = ""
    section_end: str = ""
    is_bare: bool = False

    def of(self, tools: Sequence[ToolSpec]) -> ToolCallFormat | None:
        """None: an argument of one of the tools can't be written."""
        calls = []
        for tool in tools:
            content = self._arguments(tool.parameters)
            if content is None:
                return None
            begin = self.begin.replace("NAME", encode_text(tool.name))
            calls.append(CallTag(tool.name, begin, self.end, tool.parameters, content))
        return ToolCallFormat(
            calls=calls,
            triggers=list(dict.fromkeys(each.replace("NAME", tool.name) for each in self.triggers for tool in tools)),
            section_begin=self.section_begin,
            separator=self.separator,
            section_end=self.section_end,
            is_bare=self.is_bare,
        )

    def _arguments(self, schema: Json) -> Json | None:
        return {"type": "json_schema", "json_schema": schema or {"type": "object"}}


class MarkupShape(CallShape, frozen=True, kw_only=True):
    """Arguments one after another, in the schema's order: texts as they are, everything else as JSON.

    `argument_begin` has `KEY` for the argument's name (`argument_end` may), `IS_TEXT` for whether it is a text, and `TYPE`
    for its type's name.
    """

    argument_begin: str
    argument_end: str

    def _arguments(self, schema: Json) -> Json | None:
        shared = {name: schema[name] for name in _SHARED if name in schema}
        required = schema.get("required") or []
        elements: list[Json] = []
        for name, value in (schema.get("properties") or {}).items():
            content = _value(value, shared)
            if content is None:
                return None
            is_text = "false" if content["type"] == "json_schema" else "true"
            kind = value["type"] if is_text == "false" else "string"
            begin = self.argument_begin.replace("IS_TEXT", is_text).replace("TYPE", kind).replace("KEY", name)
            end = self.argument_end.replace("KEY", name)
            written: Json = {"type": "tag", "begin": begin, "content": content, "end": end}
            elements.append(written if name in required else {"type": "optional", "content": written})
        return {"type": "sequence", "elements": elements} if elements else {"type": "const_string", "value": ""}


_MOST_OPTIONAL = 16
"""Any of the optional arguments may be the first: with more of them, writing down every way takes too long."""


class PythonShape(CallShape, frozen=True, kw_only=True):
    """Arguments by name, the required ones first: `a=1, b="x"`. Values are written as JSON, which is read as well."""

    assign: str = "="
    comma: str = ", "
    quote: str = ""
    """Around texts, which are then written as they are."""

    def _arguments(self, schema: Json) -> Json | None:
        shared = {name: schema[name] for name in _SHARED if name in schema}
        properties = schema.get("properties") or {}
        required = [name for name in schema.get("required") or [] if name in properties]
        optional = [name for name in properties if name not in required]
        values = {name: {**shared, **value} for name, value in properties.items() if isinstance(value, dict)}
        if any(not name.isidentifier() or keyword.iskeyword(name) or name not in values for name in properties):
            return None

        def written(name: str, before: str) -> list[Json]:
            content: Json = {"type": "json_schema", "json_schema": values[name]}
            if self.quote and (text := _value(values[name], shared)) is not None and text["type"] != "json_schema":
                content = {"type": "tag", "begin": self.quote, "content": text, "end": self.quote}
            return [{"type": "const_string", "value": f"{before}{name}{self.assign}"}, content]

        def more(names: Sequence[str]) -> list[Json]:
            return [{"type": "optional", "content": _sequence(written(name, self.comma))} for name in names]

        if required:
            first, *rest = required
            parts = written(first, "") + [part for name in rest for part in written(name, self.comma)]
            return _sequence(parts + more(optional))
        if len(optional) > _MOST_OPTIONAL:
            return None
        ways = [_sequence(written(name, "") + more(optional[at + 1 :])) for at, name in enumerate(optional)]
        if not ways:
            return {"type": "const_string", "value": ""}
        return {"type": "optional", "content": {"type": "or", "elements": ways} if len(ways) > 1 else ways[0]}


def _sequence(elements: list[Json]) -> Json:
    return {"type": "sequence", "elements": elements}


def _value(schema: Any, shared: Json) -> Json | None:
    """The format of one argument's value between its tags; None: a grammar can't constrain it."""
    if not isinstance(schema, dict):
        return None
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in choices]}
    if schema.get("type") == "string" and choices is None and not any(name in schema for name in _LIMITS):
        return {"type": "any_text"}
    if schema.get("type") in _JSON_TYPES:
        return {"type": "json_schema", "json_schema": {**shared, **schema}}
    return None
