"""Schemas of a body, relaxed to what can be enforced. The names returned stand in the header of the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bough.core import bounds
from bough.entrypoints.http.openai.schema import Common, Tool
from bough.grammar.relax import relax

Json = dict[str, Any]


def relax_answer(body: Common) -> tuple[str, ...]:
    """Relaxes the schemas that the body's constraints hold, in place; returns what was left out."""
    dropped: list[str] = []
    form = body.response_format
    if form is not None:
        key = "json_schema" if form.get("type") == "json_schema" else None
        wrapper = form.get(key) if key else form
        for name in ("schema", "schema_"):
            schema = wrapper.get(name) if isinstance(wrapper, dict) else None
            if isinstance(schema, dict) and isinstance(wrapper, dict):
                bounds.depth(schema, "schema_depth", "response_format")
                relaxed, more = relax(schema, strict=wrapper.get("strict") is True, at="response_format")
                if more:
                    wrapper = {**wrapper, name: relaxed}
                    body.response_format = {**form, key: wrapper} if key else wrapper
                    dropped += more
    for field in ("json_schema", "guided_json"):
        value, more = _relaxed_value(getattr(body, field), field)
        if more:
            setattr(body, field, value)
            dropped += more
    asked = body.structured_outputs
    if asked is not None and asked.json is not None:
        asked.json, more = _relaxed_value(asked.json, "structured_outputs")
        dropped += more
    return tuple(dropped)


def relax_tools(tools: Sequence[Tool]) -> tuple[list[Tool], tuple[str, ...]]:
    """The tools with schemas that can be enforced, and what was left out of them."""
    made: list[Tool] = []
    dropped: list[str] = []
    for at, tool in enumerate(tools):
        function = tool.function
        bounds.depth(function.parameters, "schema_depth", "tools")
        schema, more = relax(function.parameters, strict=bool(function.strict), at=f"tools[{at}]")
        dropped += more
        made.append(Tool(function=_with(function, schema)) if more else tool)
    return made, tuple(dropped)


def _with(function: Any, schema: Json) -> Any:
    return type(function)(
        name=function.name, description=function.description, parameters=schema, strict=function.strict
    )


def _relaxed_value(value: str | Json | None, field: str) -> tuple[Any, list[str]]:
    """A schema as an object or as text; invalid ones are left to later checks."""
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = json.loads(value) if value.lstrip().startswith("{") else None
        except (ValueError, RecursionError):
            return value, []
    if not isinstance(schema, dict):
        return value, []
    bounds.depth(schema, "schema_depth", field)
    relaxed, more = relax(schema, strict=False, at=field)
    return (relaxed if more else value), more
