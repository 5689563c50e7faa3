"""Deltas of a chat request as a growing response, and as the events about it.

Items follow one another: each is added, filled and done before the next. `Growing.response` is the response so far.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from bough.core.errors import BoughError
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
from bough.engine_client.endings import GIVEN_UP, raise_if_failed
from bough.engine_client.names import random_name
from bough.entrypoints.http.errors import in_words
from bough.entrypoints.http.openai.chat_answer import ChatForm, events_of
from bough.entrypoints.http.openai.shapes import chat_logprob_items
from bough.entrypoints.http.responses.schema import Json, ResponsesRequest
from bough.entrypoints.http.responses.tools import OfferedTools, text_argument

_encode = msgspec.json.Encoder().encode


def new_response(asked: ResponsesRequest, model: str, name: str = "") -> Json:
    """A response that has not begun. `name`: 32 hexadecimal digits for its id, if not any."""
    reasoning, text = asked.reasoning, asked.text
    return {
        "id": f"resp_{name or random_name()}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if asked.background else "in_progress",
        "background": bool(asked.background),
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "store": asked.store is not False,
        "temperature": asked.temperature,
        "text": {"format": (text.format if text is not None else None) or {"type": "text"}},
        "tool_choice": asked.tool_choice if asked.tool_choice is not None else "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": asked.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None,
        "user": asked.user,
    }


class Growing:
    """Builds one response. Every method returns the events about its change."""

    def __init__(self, response: Json, form: ChatForm, offered: OfferedTools) -> None:
        self.response = response
        self._form = form
        self._offered = offered
        self._sequence = 0
        self._open: Json | None = None
        """The item being filled; it is the last of `response["output"]`."""
        self._pieces: list[str] = []
        self._scores: list[Json] = []

    @property
    def ended(self) -> bool:
        return self.response["status"] not in ("queued", "in_progress")

    def begin(self) -> list[Json]:
        """The first events."""
        events = [self._event("response.created", response=self._snapshot())]
        if self.response["status"] == "queued":
            events.append(self._event("response.queued", response=self._snapshot()))
        return events

    def start(self) -> list[Json]:
        """The model has begun."""
        self.response["status"] = "in_progress"
        return [self._event("response.in_progress", response=self._snapshot())]

    def add(self, delta: Delta) -> list[Json]:
        """Adds a delta. Raises the error that the answer ended with."""
        raise_if_failed(delta.end)
        scores = (
            chat_logprob_items(delta.logprobs, self._form.known)
            if delta.logprobs is not None and self._form.logprobs
            else []
        )
        events: list[Json] = []
        for each in events_of(delta, self._form):
            events += self._parsed(each, scores)
            if isinstance(each, Content):
                scores = []
        if delta.end is not None:
            events += self._finish(delta.end)
        return events

    def fail(self, error: BoughError) -> list[Json]:
        """The request failed."""
        events = self._close("incomplete")
        code = (
            "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else "server_error"
        )
        self.response["error"] = {"code": code, "message": in_words(error, "/v1/responses")[0]}
        self.response["status"] = "failed"
        return [*events, self._event("response.failed", response=self._snapshot())]

    def cancel(self) -> list[Json]:
        """The request was cancelled."""
        events = self._close("incomplete")
        self.response["status"] = "cancelled"
        return events

    # -- items ------------------------------------------------------------------------------------

    def _parsed(self, parsed: ParsedEvent, scores: list[Json]) -> list[Json]:
        match parsed:
            case Content(text):
                opened = self._ensure("message")
                self._scores += scores
                shown = [{name: each[name] for name in ("token", "logprob", "top_logprobs")} for each in scores]
                return [*opened, self._piece("response.output_text.delta", text, content_index=0, logprobs=shown)]
            case Reasoning(text):
                return [
                    *self._ensure("reasoning"),
                    self._piece("response.reasoning_text.delta", text, content_index=0),
                ]
            case ToolCallBegin(_, call_id, name):
                closed = self._close()
                item = self._offered.call_item(call_id, name)
                return [*closed, *self._ensure(item.pop("type"), **item)]
            case ToolCallArguments(_, json_delta):
                if self._open is not None and self._open["type"] == "custom_tool_call":
                    self._pieces.append(json_delta)  # its text is known once the JSON around it is whole
                    return []
                return [self._piece("response.function_call_arguments.delta", json_delta)]
            case ToolCallEnd():
                return self._close()

    def _ensure(self, kind: str, **fields: str) -> list[Json]:
        """Opens an item of this kind, unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close()
        self._open = _item(kind, **fields)
        self._pieces, self._scores = [], []
        self.response["output"].append(self._open)
        events.append(self._event("response.output_item.added", output_index=self._at, item=dict(self._open)))
        part = _part(kind, "", [])
        if part is not None:
            events.append(self._here("response.content_part.added", content_index=0, part=part))
        return events

    def _close(self, status: str = "completed") -> list[Json]:
        item = self._open
        if item is None:
            return []
        text = "".join(self._pieces)
        events: list[Json] = []
        part = _part(item["type"], text, self._scores)
        match item["type"]:
            case "message":
                shown = [{name: each[name] for name in ("token", "logprob", "top_logprobs")} for each in self._scores]
                events.append(self._here("response.output_text.done", content_index=0, text=text, logprobs=shown))
            case "reasoning":
                events.append(self._here("response.reasoning_text.done", content_index=0, text=text))
            case "custom_tool_call":
                item["input"] = text_argument(text)
                kind = "response.custom_tool_call_input"
                events.append(self._here(f"{kind}.delta", delta=item["input"]))
                events.append(self._here(f"{kind}.done", input=item["input"]))
            case _:
                item["arguments"] = text
                events.append(self._here("response.function_call_arguments.done", arguments=text, name=item["name"]))
        if part is not None:
            item["content"] = [part]
            events.append(self._here("response.content_part.done", content_index=0, part=part))
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=self._at, item=dict(item)))
        self._open = None
        return events

    def _finish(self, end: End) -> list[Json]:
        cut = end.reason == "length" or (end.reason == "abort" and end.status == GIVEN_UP)
        events = self._close("incomplete" if cut else "completed")
        self.response["usage"] = usage(end, report_cache=self._form.report_cache)
        if end.reason == "abort":
            self.response["status"] = "cancelled"
            return events
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return [*events, self._event(f"response.{self.response['status']}", response=self._snapshot())]

    # -- events -----------------------------------------------------------------------------------

    @property
    def _at(self) -> int:
        return len(self.response["output"]) - 1

    def _piece(self, kind: str, text: str, **fields: Any) -> Json:
        self._pieces.append(text)
        return self._here(kind, delta=text, **fields)

    def _here(self, kind: str, **fields: Any) -> Json:
        """An event about the item in progress."""
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=self._at, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _snapshot(self) -> Json:
        return {**self.response, "output": list(self.response["output"])}


def _item(kind: str, **fields: str) -> Json:
    if kind == "message":
        return {
            "id": f"msg_{random_name()}", "type": "message", "role": "assistant", "status": "in_progress", "content": [],
        }  # fmt: skip
    if kind == "reasoning":
        return {
            "id": f"rs_{random_name()}", "type": "reasoning", "summary": [], "content": [], "status": "in_progress",
        }  # fmt: skip
    mark = "ctc" if kind == "custom_tool_call" else "fc"
    return {"id": f"{mark}_{random_name()}", "type": kind, "status": "in_progress", **fields}


def _part(kind: str, text: str, scores: list[Json]) -> Json | None:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
    return {"type": "reasoning_text", "text": text} if kind == "reasoning" else None


def usage(end: End, *, report_cache: bool) -> Json:
    """Tokens of one response."""
    cached = min(end.prompt_tokens, end.cached_tokens) if report_cache else 0
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def event_bytes(event: Json) -> bytes:
    """One server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _encode(event))
