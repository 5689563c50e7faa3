"""Deltas of a chat request as OpenAI's body, or as its chunks.

A chunk that carries nothing but text (almost every chunk) is joined from prepared bytes; only the text is encoded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from bough.core.messages import (
    Content,
    Delta,
    End,
    Ids,
    ParsedEvent,
    Reasoning,
    TokenLogprobs,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    unpack_ids,
)
from bough.engine_client.endings import raise_if_failed
from bough.engine_client.native import draft_fields
from bough.entrypoints.http.openai.shapes import BytesOf, bytes_of, chat_logprobs, finish_reason, join_scores, usage
from bough.entrypoints.service import News
from bough.entrypoints.stream import DONE, event
from bough.parsers import assemble

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode


class ChatForm(Struct, frozen=True, kw_only=True):
    """The format of one request's answers."""

    id: str
    model: str
    num_choices: int = 1
    parsed: bool = False
    """Text arrives as parser events."""
    at_most_one_call: bool = False
    logprobs: bool = False
    known: BytesOf = field(default_factory=lambda: bytes_of(None))
    """The bytes of scored tokens."""
    token_ids: bool = False
    prompt_ids: bool = False
    report_cache: bool = True
    include_usage: bool = False
    usage_in_chunks: bool = False
    meta_info: bool = False
    legacy: bool = False
    """Calls are sent as `function_call`, for clients that sent `functions`."""
    created: int = field(default_factory=lambda: int(time.time()))


def events_of(delta: Delta, form: ChatForm) -> list[ParsedEvent]:
    """The events of a delta, or its text as content. Calls after the first are dropped if only one is allowed."""
    if not form.parsed:
        return [Content(delta.text)] if delta.text else []
    if not form.at_most_one_call:
        return delta.events
    return [each for each in delta.events if isinstance(each, Content | Reasoning) or each.index == 0]


# -- one body -------------------------------------------------------------------------------------


class ChatBody:
    """Collects the deltas of all choices into one response."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._choices = [_Collected() for _ in range(form.num_choices)]
        self._prompt: Ids | None = None

    def add(self, news: News) -> None:
        """Raises the error that a choice ended with."""
        _, stream, delta = news
        self._prompt = stream.prompt
        choice = self._choices[stream.index]
        choice.events.extend(events_of(delta, self._form))
        if delta.logprobs is not None:
            choice.scores.append(delta.logprobs)
        if delta.tokens and self._form.token_ids:
            choice.token_ids.extend(unpack_ids(delta.tokens).tolist())
        if delta.hidden_states is not None:
            choice.hidden_states.extend(delta.hidden_states)
        if delta.end is not None:
            raise_if_failed(delta.end)
            choice.end = delta.end

    def render(self) -> Json:
        """The whole response. Every choice must have ended."""
        form = self._form
        body: Json = {
            "id": form.id,
            "object": "chat.completion",
            "created": form.created,
            "model": form.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage((choice.ended for choice in self._choices), with_cache=form.report_cache),
        }
        if form.prompt_ids and self._prompt is not None:
            body["prompt_token_ids"] = self._prompt.tolist()
        return body

    def _choice(self, index: int, choice: _Collected) -> Json:
        parsed = assemble(choice.events)
        message: Json = {"role": "assistant", "content": parsed.content}
        message |= thoughts(parsed.reasoning)
        if parsed.tool_calls:
            message["content"] = parsed.content or None
            calls: list[Json] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
            message |= {"function_call": calls[0]["function"]} if self._form.legacy else {"tool_calls": calls}
        rendered: Json = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(join_scores(choice.scores), self._form.known) if self._form.logprobs else None,
            "finish_reason": finish_reason(
                choice.ended, called_tools=bool(parsed.tool_calls), legacy=self._form.legacy
            ),
            "matched_stop": choice.ended.matched,
        }
        if self._form.token_ids:
            rendered["token_ids"] = choice.token_ids
        if choice.hidden_states:
            rendered["hidden_states"] = choice.hidden_states
        if self._form.meta_info:
            rendered["meta_info"] = meta_info(choice.ended)
        return rendered


class _Collected:
    def __init__(self) -> None:
        self.events: list[ParsedEvent] = []
        self.scores: list[TokenLogprobs] = []
        self.token_ids: list[int] = []
        self.hidden_states: list[list[float]] = []
        self.end: End | None = None

    @property
    def ended(self) -> End:
        if self.end is None:
            raise RuntimeError("a choice has not ended")
        return self.end


def thoughts(text: str) -> Json:
    """Reasoning under both names that clients read: `reasoning_content` and `reasoning`. Null: there is none."""
    return {"reasoning_content": text or None, "reasoning": text or None}


_NO_THOUGHTS = thoughts("")
"""Present in every message and chunk without reasoning, so that clients can read the fields unconditionally."""


def meta_info(end: End) -> Json:
    """Timings and counts of one completion."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "cached_tokens": end.cached_tokens,
        "reasoning_tokens": end.reasoning_tokens,
        "num_retractions": end.retractions,
        "queue_time": end.queued_s,
        "prefill_time": end.prefill_s,
        "decode_time": end.decode_s,
        **draft_fields(end),
    }


# -- chunks ---------------------------------------------------------------------------------------


class ChatChunks:
    """Renders deltas as server-sent events. `add` may return several events, or none."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._head = _encode(
            {"id": form.id, "object": "chat.completion.chunk", "created": form.created, "model": form.model}
        )[:-1]
        tail = b',"usage":null}\n\n' if form.include_usage else b"}\n\n"
        self._before = [self._lead(i) + b'"content":' for i in range(form.num_choices)]
        self._after = b"," + _encode(_NO_THOUGHTS)[1:] + b',"logprobs":null,"finish_reason":null}]' + tail
        self._plain = not (form.usage_in_chunks or form.token_ids)
        self._begun = [False] * form.num_choices
        self._called = [False] * form.num_choices
        self._counts = [0] * form.num_choices
        self._ends: list[End] = []
        self._prompt: Ids | None = None
        self._prompt_sent = not form.prompt_ids

    def add(self, news: News) -> bytes:
        """The delta's events. Raises the error that a choice ended with."""
        _, stream, delta = news
        index = stream.index
        self._prompt = stream.prompt
        parts: list[bytes] = []
        if not self._begun[index]:
            self._begun[index] = True
            parts.append(self._first(index))
        pieces = events_of(delta, self._form)
        logprobs = chat_logprobs(delta.logprobs, self._form.known) if self._form.logprobs else None
        token_ids = unpack_ids(delta.tokens).tolist() if self._form.token_ids and delta.tokens else None
        self._counts[index] += len(delta.tokens) // 4
        if logprobs is not None or token_ids is not None:
            first = pieces[0] if pieces else Content("")
            parts.append(self._chunk(index, self._as_delta(index, first), logprobs=logprobs, token_ids=token_ids))
            pieces = pieces[1:]
        parts.extend(self._event(index, each) for each in pieces)
        if delta.end is not None:
            parts.append(self._finish(index, delta.end, delta.hidden_states))
        return b"".join(parts)

    def last(self) -> bytes:
        """What follows the last choice's end."""
        if not self._form.include_usage:
            return DONE
        counted = usage(self._ends, with_cache=self._form.report_cache)
        return b"data: " + self._head + b',"choices":[],"usage":' + _encode(counted) + b"}\n\n" + DONE

    def _lead(self, index: int) -> bytes:
        return b"data: " + self._head + b',"choices":[{"index":%d,"delta":{' % index

    def _first(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def _event(self, index: int, each: ParsedEvent) -> bytes:
        if self._plain and isinstance(each, Content):
            return self._before[index] + _encode(each.text) + self._after
        shown = self._as_delta(index, each)
        return self._chunk(index, shown) if shown else b""

    def _as_delta(self, index: int, each: ParsedEvent) -> Json:
        match each:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return thoughts(text)
            case ToolCallBegin(at, call_id, name):
                self._called[index] = True
                function = {"name": name, "arguments": ""}
                if self._form.legacy:
                    return {"function_call": function}
                return {"tool_calls": [{"index": at, "id": call_id, "type": "function", "function": function}]}
            case ToolCallArguments(at, json_delta):
                if self._form.legacy:
                    return {"function_call": {"arguments": json_delta}}
                return {"tool_calls": [{"index": at, "function": {"arguments": json_delta}}]}
            case ToolCallEnd():
                return {}

    def _chunk(
        self,
        index: int,
        shown: Json,
        *,
        logprobs: Json | None = None,
        token_ids: list[int] | None = None,
        finish: Json | None = None,
    ) -> bytes:
        form = self._form
        choice: Json = {
            "index": index,
            "delta": {**_NO_THOUGHTS, **shown},
            "logprobs": logprobs,
            "finish_reason": None,
            **(finish or {}),
        }
        if token_ids is not None:
            choice["token_ids"] = token_ids
        chunk: Json = {
            "id": form.id,
            "object": "chat.completion.chunk",
            "created": form.created,
            "model": form.model,
            "choices": [choice],
        }
        if not self._prompt_sent and self._prompt is not None:
            chunk["prompt_token_ids"] = self._prompt.tolist()
            self._prompt_sent = True
        if form.usage_in_chunks:
            chunk["usage"] = self._usage_so_far()
        elif form.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def _finish(self, index: int, end: End, hidden_states: Iterable[list[float]] | None) -> bytes:
        raise_if_failed(end)
        self._ends.append(end)
        finish: Json = {
            "finish_reason": finish_reason(end, called_tools=self._called[index], legacy=self._form.legacy),
            "matched_stop": end.matched,
        }
        if hidden_states is not None:
            finish["hidden_states"] = list(hidden_states)
        if self._form.meta_info:
            finish["meta_info"] = meta_info(end)
        return self._chunk(index, {}, finish=finish)

    def _usage_so_far(self) -> Json:
        prompt = 0 if self._prompt is None else len(self._prompt)
        completion = sum(self._counts)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
