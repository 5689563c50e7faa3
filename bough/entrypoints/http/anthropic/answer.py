"""Deltas of a chat request as Anthropic's message, or as its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from bough.core.messages import (
    Content,
    Delta,
    End,
    ParsedEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from bough.engine_client.endings import raise_if_failed
from bough.engine_client.names import random_name
from bough.entrypoints.http.errors import error_body
from bough.entrypoints.http.openai.chat_answer import ChatForm, events_of
from bough.parsers import assemble

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """The format of one request's answer."""

    chat: ChatForm
    max_tokens: int
    id: str = field(default_factory=lambda: f"msg_{random_name()}")


class MessageBody:
    """Collects the deltas into one message."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._events: list[ParsedEvent] = []
        self._end: End | None = None

    def add(self, delta: Delta) -> None:
        """Raises the error that the answer ended with."""
        self._events += events_of(delta, self._form.chat)
        if delta.end is not None:
            raise_if_failed(delta.end, whole=True)
            self._end = delta.end

    def render(self) -> Json:
        """The whole message. The answer must have ended."""
        if self._end is None:
            raise RuntimeError("the answer has not ended")
        parsed = assemble(self._events)
        content: list[Json] = []
        if parsed.reasoning:
            content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.content:
            content.append({"type": "text", "text": parsed.content})
        content += [
            {"type": "tool_use", "id": _tool_id(), "name": call.name, "input": as_object(call.arguments)}
            for call in parsed.tool_calls
        ]
        reason, sequence = stop_reason(self._end, self._form.max_tokens, called_tools=bool(parsed.tool_calls))
        return {
            **_head(self._form),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage(self._end, report_cache=self._form.chat.report_cache),
        }


class MessageEvents:
    """Renders deltas as server-sent events, in the order that Anthropic's clients expect: a message starts, its blocks
    follow one another (start, deltas, stop), then its end and what it cost."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._begun = False
        self._open = ""
        """Type of the block that is being written; empty between blocks."""
        self._index = -1
        self._called = False

    def add(self, delta: Delta, prompt_tokens: int) -> bytes:
        """The delta's events. Raises the error that the answer ended with."""
        raise_if_failed(delta.end, whole=True)
        parts: list[bytes] = []
        if not self._begun:
            self._begun = True
            start = {**_head(self._form), "content": [], "stop_reason": None, "stop_sequence": None}
            start["usage"] = _usage(prompt_tokens, 0, 0)
            parts += [event("message_start", message=start), event("ping")]
        for piece in events_of(delta, self._form.chat):
            parts += self._event(piece)
        if delta.end is not None:
            parts += [*self._close(), *self._finish(delta.end)]
        return b"".join(parts)

    def _event(self, piece: ParsedEvent) -> list[bytes]:
        match piece:
            case Content(text):
                opened = self._ensure("text", {"type": "text", "text": ""})
                return [*opened, self._delta({"type": "text_delta", "text": text})]
            case Reasoning(text):
                opened = self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*opened, self._delta({"type": "thinking_delta", "thinking": text})]
            case ToolCallBegin(_, _, name):
                self._called = True
                closed = self._close()
                block = {"type": "tool_use", "id": _tool_id(), "name": name, "input": {}}
                return [*closed, *self._ensure("tool_use", block)]
            case ToolCallArguments(_, json_delta):
                return [self._delta({"type": "input_json_delta", "partial_json": json_delta})]
            case ToolCallEnd():
                return self._close()

    def _ensure(self, kind: str, block: Json) -> list[bytes]:
        if self._open == kind:
            return []
        closed = self._close()
        self._open = kind
        self._index += 1
        return [*closed, event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: Json) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [event("content_block_stop", index=self._index)]

    def _finish(self, end: End) -> list[bytes]:
        reason, sequence = stop_reason(end, self._form.max_tokens, called_tools=self._called)
        counted = usage(end, report_cache=self._form.chat.report_cache)
        return [
            event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=counted),
            event("message_stop"),
        ]


def event(kind: str, **fields: Any) -> bytes:
    """One named event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def error_event(error: BaseException, path: str) -> bytes:
    """The error as the last event of a stream that was already open."""
    return b"event: error\ndata: %s\n\n" % _encode(error_body(error, path))


def stop_reason(end: End, max_tokens: int, *, called_tools: bool) -> tuple[str, str | None]:
    """Anthropic's stop reason of a message, and the stop sequence, if any."""
    if end.reason == "length":
        return ("max_tokens" if end.completion_tokens >= max_tokens else "model_context_window_exceeded"), None
    if isinstance(end.matched, str):
        return "stop_sequence", end.matched
    return ("tool_use" if called_tools else "end_turn"), None


def usage(end: End, *, report_cache: bool) -> Json:
    """Usage of an answer; Anthropic counts cached tokens separately."""
    return _usage(end.prompt_tokens, end.cached_tokens if report_cache else 0, end.completion_tokens)


def _usage(prompt: int, cached: int, output: int) -> Json:
    return {
        "input_tokens": prompt - min(prompt, cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": min(prompt, cached),
        "output_tokens": output,
    }


def _tool_id() -> str:
    """The id of a call, as Anthropic's clients expect ids to begin."""
    return f"toolu_{random_name()}"


def _head(form: MessageForm) -> Json:
    return {"id": form.id, "type": "message", "role": "assistant", "model": form.chat.model}


def as_object(arguments: str) -> Json:
    """A call's arguments. If the model did not write a JSON object, its text is returned under one key."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}
