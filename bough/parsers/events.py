"""Events of one answer: collecting and merging them, and the tools of the request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from bough.core.errors import InvalidRequest
from bough.core.messages import (
    Content,
    ParsedEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool the model was offered: its name and the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any] = {}


class ToolCall(msgspec.Struct, frozen=True):
    """A call assembled from its events.

    `complete` is False where the model stopped inside the arguments or broke their syntax: `arguments` is then a
    prefix of JSON, left open on purpose so that no client runs a call that was cut short.
    """

    index: int
    id: str
    name: str
    arguments: str
    complete: bool = True


class Parsed(msgspec.Struct, frozen=True):
    """All events of a text, merged."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall]


class EventSink:
    """Collects events in order; neighbouring pieces of the same text become one event.

    With `hold_reasoning` a reasoning section is one event, sent when it ends.
    """

    def __init__(self, *, hold_reasoning: bool = False) -> None:
        self._hold_reasoning = hold_reasoning
        self._held: list[str] = []
        self._events: list[ParsedEvent] = []
        self._pieces: list[str] = []
        self._open: type[Content] | type[Reasoning] | int | None = None

    def content(self, text: str) -> None:
        self._piece(Content, text)

    def reasoning(self, text: str) -> None:
        if self._hold_reasoning:
            self._held.append(text)
        else:
            self._piece(Reasoning, text)

    def reasoning_ends(self) -> None:
        if self._held:
            self._piece(Reasoning, "".join(self._held))
            self._held.clear()

    def arguments(self, index: int, json_delta: str) -> None:
        self._piece(index, json_delta)

    def add(self, event: ParsedEvent) -> None:
        match event:
            case Content(text):
                self._piece(Content, text)
            case Reasoning(text):
                self._piece(Reasoning, text)
            case ToolCallArguments(index, json_delta):
                self._piece(index, json_delta)
            case ToolCallBegin() | ToolCallEnd():
                self._flush()
                self._events.append(event)

    def take(self) -> list[ParsedEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _piece(self, kind: type[Content] | type[Reasoning] | int, text: str) -> None:
        if not text:
            return
        if self._open != kind:
            self._flush()
            self._open = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        if self._open is None:
            return
        text = "".join(self._pieces)
        self._events.append(ToolCallArguments(self._open, text) if isinstance(self._open, int) else self._open(text))
        self._pieces = []
        self._open = None


def assemble(events: Iterable[ParsedEvent]) -> Parsed:
    """The whole answer the events describe, however they were cut."""
    content: list[str] = []
    reasoning: list[str] = []
    begins: dict[int, ToolCallBegin] = {}
    arguments: dict[int, list[str]] = {}
    ended: set[int] = set()
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallBegin(index):
                begins[index] = event
                arguments[index] = []
            case ToolCallArguments(index, json_delta):
                arguments[index].append(json_delta)
            case ToolCallEnd(index):
                ended.add(index)
    calls = [ToolCall(i, b.id, b.name, "".join(arguments[i]), i in ended) for i, b in sorted(begins.items())]
    return Parsed("".join(content), "".join(reasoning), calls)


def tool_specs(tools: str | Iterable[Mapping[str, Any]]) -> list[ToolSpec]:
    """Tools from their JSON list (or its values): OpenAI's `{"type": "function", "function": {...}}`, the flat form of
    the Responses API, or Anthropic's `input_schema`. Tools that are not functions are skipped."""
    if isinstance(tools, str):
        try:
            decoded = msgspec.json.decode(tools, type=list[dict[str, Any]]) if tools.strip() else []
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                what="the tools are not a JSON list of objects",
                why=str(error),
                fix="send a list of tools",
                param="tools",
            ) from error
        return tool_specs(decoded)
    specs = []
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise InvalidRequest(
                what=f"a tool is not an object: {tool!r}", fix="send each tool as a JSON object", param="tools"
            )
        function = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        name = function.get("name")
        if not isinstance(name, str) or not name:
            if tool.get("type", "function") == "function":
                raise InvalidRequest(what="a tool has no name", fix="give every function a name", param="tools")
            continue
        schema = function.get("parameters")
        if schema is None:
            schema = function.get("input_schema")
        specs.append(ToolSpec(name, dict(schema) if isinstance(schema, Mapping) else {}))
    return specs
