"""Parses one answer: reasoning first, then tool calls in the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bough.core.messages import Content, ParsedEvent, Reasoning, TextSpec, ToolCallBegin
from bough.parsers.events import EventSink, Parsed, ToolSpec, assemble, tool_specs
from bough.parsers.reasoning import ReasoningParser, reasoning_parser
from bough.parsers.scan import IdFactory, Parser
from bough.parsers.tools import tool_parser


class ResponseParser:
    """The parser of one request. Either part may be absent; with neither, all text is Content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: Parser | None = None,
        *,
        calls_only: bool = False,
        known_tools: frozenset[str] | None = None,
    ) -> None:
        """`calls_only`: a grammar holds the answer to calls, so what the text's end leaves unread was going to be one.
        `known_tools`: calls of others are left out (None: of none)."""
        self._reasoning = reasoning
        self._tools = tools
        self._calls_only = calls_only
        self._known_tools = known_tools
        self._numbers: dict[int, int] = {}
        """Calls that are sent: their number in the parser -> their number for the client."""

    @classmethod
    def named(
        cls,
        *,
        reasoning: str | None = None,
        tools: str | None = None,
        tool_list: Sequence[ToolSpec] = (),
        force_reasoning: bool | None = None,
        stream_reasoning: bool = True,
        calls_only: bool = False,
        drop_unknown_tools: bool = False,
        new_id: IdFactory | None = None,
    ) -> ResponseParser:
        """From the parsers' names."""
        return cls(
            reasoning_parser(reasoning, force_reasoning=force_reasoning, stream_reasoning=stream_reasoning)
            if reasoning
            else None,
            tool_parser(tools, tool_list, new_id=new_id) if tools else None,
            calls_only=calls_only,
            known_tools=frozenset(tool.name for tool in tool_list) if drop_unknown_tools else None,
        )

    @classmethod
    def of(cls, spec: TextSpec, *, new_id: IdFactory | None = None) -> ResponseParser:
        """As a request's TextSpec asks. `reasoning_forced` is taken at its word, see `chat_opens_reasoning`."""
        return cls.named(
            reasoning=spec.reasoning_parser,
            tools=spec.tool_parser,
            tool_list=tool_specs(spec.tools) if spec.tool_parser else (),
            force_reasoning=spec.reasoning_forced,
            stream_reasoning=spec.stream_reasoning,
            calls_only=spec.calls_only,
            drop_unknown_tools=spec.drop_unknown_tools,
            new_id=new_id,
        )

    @property
    def needs_special_tokens(self) -> bool:
        return any(part.needs_special_tokens for part in (self._reasoning, self._tools) if part is not None)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts the parsers look for: special tokens among them must survive detokenising, others may go."""
        parts = [part.markers for part in (self._reasoning, self._tools) if part is not None]
        return tuple(dict.fromkeys(marker for part in parts for marker in part))

    @property
    def in_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.in_reasoning

    def feed(self, text: str) -> list[ParsedEvent]:
        return self._pass_on(self._reasoning.feed(text) if self._reasoning else [Content(text)] if text else [], False)

    def finish(self) -> list[ParsedEvent]:
        """Ends the text; `feed` must not be called afterwards."""
        return self._pass_on(self._reasoning.finish() if self._reasoning else [], True)

    def _pass_on(self, events: list[ParsedEvent], last: bool) -> list[ParsedEvent]:
        if self._tools is None:
            return events
        sink = EventSink()
        for event in events:
            for parsed in self._tools.feed(event.text) if isinstance(event, Content) else [event]:
                self._tell(parsed, sink)
        for parsed in self._tools.finish() if last else []:
            if not (self._calls_only and isinstance(parsed, Content)):
                self._tell(parsed, sink)
        return sink.take()

    def _tell(self, event: ParsedEvent, sink: EventSink) -> None:
        """Passes an event on, unless it belongs to a dropped call; the other calls are renumbered without gaps."""
        if self._known_tools is None or isinstance(event, Content | Reasoning):
            sink.add(event)
            return
        if isinstance(event, ToolCallBegin) and event.name in self._known_tools:
            self._numbers[event.index] = len(self._numbers)
        if (number := self._numbers.get(event.index)) is not None:
            sink.add(msgspec.structs.replace(event, index=number))


def parse_tool_calls(text: str, tools: str | Sequence[Mapping[str, Any]], parser_name: str) -> Parsed:
    """The calls in a whole text, and the content around them."""
    parser = tool_parser(parser_name, tool_specs(tools))
    return assemble([*parser.feed(text), *parser.finish()])


def separate_reasoning(text: str, parser_name: str, *, force_reasoning: bool | None = None) -> Parsed:
    """A whole text's reasoning and content."""
    parser = reasoning_parser(parser_name, force_reasoning=force_reasoning)
    return assemble([*parser.feed(text), *parser.finish()])
