"""Deltas of a request as Ollama's objects: pieces, and a last one with its durations."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from bough.core.messages import Content, Delta, End, ParsedEvent, Reasoning, ToolCallArguments, ToolCallBegin
from bough.engine_client.endings import raise_if_failed
from bough.entrypoints.http.anthropic.answer import as_object
from bough.entrypoints.http.errors import error_body
from bough.entrypoints.http.ollama.schema import Kind
from bough.entrypoints.http.openai.chat_answer import ChatForm, events_of
from bough.entrypoints.http.openai.shapes import chat_logprob_items

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[str] = field(default_factory=list)

    def render(self) -> Json:
        return {"function": {"name": self.name, "arguments": as_object("".join(self.arguments))}}


class OllamaAnswer:
    """Renders one answer. Calls are sent whole, when the next one begins or the answer ends."""

    def __init__(self, kind: Kind, form: ChatForm, model: str) -> None:
        self._kind = kind
        self._form = form
        self._model = model
        self._began = time.monotonic()
        self._call: _Call | None = None

    def add(self, delta: Delta) -> list[Json]:
        """The objects in which a delta is sent. Raises the error that the answer ended with."""
        raise_if_failed(delta.end, whole=True)
        scores = (
            chat_logprob_items(delta.logprobs, self._form.known)
            if delta.logprobs is not None and self._form.logprobs
            else None
        )
        objects: list[Json] = []
        for each in events_of(delta, self._form):
            piece = self._event(each)
            if piece is not None:
                objects.append(self._object(piece))
        if delta.end is not None:
            last = self._taken()
            if last is not None:
                objects.append(self._object(last))
            objects.append({**self._object({"content": ""}), "done": True, **self._ending(delta.end)})
        if scores and objects:
            objects[0]["logprobs"] = scores
        return objects

    def whole(self, pieces: list[Json]) -> Json:
        """All objects of an answer as one."""
        last = pieces[-1]
        scores = [score for piece in pieces for score in piece.get("logprobs", ())]
        merged: Json = {"content": "".join(self._text(piece) for piece in pieces)}
        thinking = "".join(self._message(piece).get("thinking", "") for piece in pieces)
        if thinking:
            merged["thinking"] = thinking
        calls = [call for piece in pieces for call in self._message(piece).get("tool_calls", ())]
        if calls:
            merged["tool_calls"] = calls
        shown = self._object(merged)
        if scores:
            shown["logprobs"] = scores
        return {**last, **shown, "done": True}

    def _event(self, each: ParsedEvent) -> Json | None:
        match each:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"content": "", "thinking": text}
            case ToolCallBegin(_, _, name):
                done, self._call = self._taken(), _Call(name)
                return done
            case ToolCallArguments(_, json_delta):
                if self._call is not None:
                    self._call.arguments.append(json_delta)
                return None
            case _:
                return self._taken()

    def _taken(self) -> Json | None:
        call, self._call = self._call, None
        return {"content": "", "tool_calls": [call.render()]} if call is not None else None

    def _object(self, piece: Json) -> Json:
        shown: Json = {"model": self._model, "created_at": now()}
        if self._kind == "chat":
            shown["message"] = {"role": "assistant", **piece}
        else:
            shown["response"] = piece.pop("content")
            shown |= piece
        shown["done"] = False
        return shown

    def _message(self, piece: Json) -> Json:
        message: Json = piece["message"] if self._kind == "chat" else piece
        return message

    def _text(self, piece: Json) -> str:
        return str(piece["message"]["content"] if self._kind == "chat" else piece["response"])

    def _ending(self, end: End) -> Json:
        return {
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._began),
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(end.prefill_s),
            "eval_count": end.completion_tokens,
            "eval_duration": _nanoseconds(end.decode_s),
        }


def loaded(kind: Kind, model: str, reason: str) -> Json:
    """The answer to a request without a prompt, with which Ollama loads (or unloads) the model."""
    empty: Json = {"message": {"role": "assistant", "content": ""}} if kind == "chat" else {"response": ""}
    return {"model": model, "created_at": now(), **empty, "done": True, "done_reason": reason}


def line(item: Json) -> bytes:
    return _encode(item) + b"\n"


def error_line(error: BaseException, path: str) -> bytes:
    """The error as the last line of a stream that was already open."""
    return line(error_body(error, path))


def _nanoseconds(seconds: float) -> int:
    return round(max(0.0, seconds) * 1e9)
