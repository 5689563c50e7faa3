"""Native routes: /generate in SGLang's JSON, tokenising, aborting, flushing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.core import bounds
from bough.core.errors import Conflict, Forbidden, InvalidRequest, no_such_token
from bough.engine_client import NativeAnswer, NativeBatch, native_batch
from bough.engine_client.endings import raise_if_failed
from bough.engine_client.gate import num_tokens
from bough.engine_client.joins import parse_join
from bough.engine_client.native import NATIVE_FIELDS, namespace_of
from bough.engine_client.request import PriorityWord
from bough.entrypoints.http.body import CheckedBody, read_json, read_object, unknown_fields
from bough.entrypoints.http.openai.chat import Handler, render
from bough.entrypoints.http.openai.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from bough.entrypoints.http.openai.tools import offer
from bough.entrypoints.http.replies import EventReply, caller_of, client_of, json_reply, long_list, placed
from bough.entrypoints.http.sessions import where_sessions_are
from bough.entrypoints.reasoning import with_reasoning
from bough.entrypoints.service import News, Service
from bough.entrypoints.stream import DONE, Events, event
from bough.tokenizer import Tokenizer

_ASK_AGAIN_S = 0.05
_MOST_PATIENCE_S = 600.0


class GenerateRequest(msgspec.Struct, kw_only=True):
    """POST /generate. Fields marked "list" may have one entry for each prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    processed_logprobs: bool | list[bool] | None = None
    """Log-probabilities after temperature, penalties and masks, instead of the model's own."""
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_hidden_states: bool | str | list[bool | str] | None = None
    image_data: Any = None
    """The images of the prompt: a URL (data:, http(s):, file:), base64, or a list of them; for a batch, one such entry
    per prompt."""
    video_data: Any = None
    """The same for videos; an entry may also be {"frames": [...], "fps": ..., "frames_indices": [...]}."""
    audio_data: Any = None
    """The same for audio."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the model's media processor."""
    priority: int | PriorityWord | list[int | PriorityWord] | None = None
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    session_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    deadline_ms: float | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None


class VertexRequest(msgspec.Struct, kw_only=True):
    """POST /vertex_generate."""

    instances: list[dict[str, Any]]
    parameters: dict[str, Any] | None = None


def generate(service: Service) -> Handler:
    """POST /generate."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        data = await read_object(request, server.max_body_bytes)
        if data.get("session_params") is not None:
            elsewhere = where_sessions_are(service, request, data)
            if elsewhere is not None:
                return elsewhere
        return await _generated(service, request, data)

    return handle


def vertex_generate(service: Service) -> Handler:
    """POST /vertex_generate: the prompts are `instances`, all other fields of /generate `parameters`."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, VertexRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        kind = next((name for name in ("text", "input_ids") if name in (asked.instances or [{}])[0]), None)
        if kind is None or any(set(each) != {kind} for each in asked.instances):
            raise InvalidRequest(
                what="the instances have no prompts, or of different kinds",
                why="each is an object with text, or each one with input_ids, and with nothing else",
                fix='send {"instances": [{"text": "..."}]}',
                param="instances",
            )
        data = {**(asked.parameters or {}), kind: [each[kind] for each in asked.instances]}
        return await _generated(service, request, data, key="predictions")

    return handle


async def _generated(service: Service, request: Request, data: dict[str, Any], key: str = "") -> Response:
    """The answer to the fields of a /generate body; `key`: under this name of an object."""
    deadline_ms = _deadline_ms(data)
    body = _known(data, strict=service.config.server.strict_api)
    batch = native_batch(
        body.value,
        defaults=service.served.sampling_defaults,
        want_text=service.served.tokenizer is not None,
        every=service.config.scheduler.stream_interval,
        bounded=True,
    )
    jobs = [placed(each, request, deadline_ms=deadline_ms) for each in batch.requests]
    batch = NativeBatch([with_reasoning(each, service.served) for each in jobs], batch.single, batch.stream)
    if batch.stream:
        return EventReply(_events(service, batch), body.headers())
    answers = await client_of(request).wait_for(_answers(service, batch))
    shown = answers[0] if batch.one_answer else answers
    return json_reply({key: answers} if key else shown, headers=body.headers())


def tokenize(service: Service) -> Handler:
    """POST /tokenize: texts, or messages as the chat template renders them."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, TokenizeRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        tokenizer = _tokenizer(service)
        special = asked.add_special_tokens is not False
        given = asked.prompt if asked.prompt is not None else asked.text
        if (given is None) == (asked.messages is None):
            raise InvalidRequest(
                what="there must be a prompt or messages",
                why="one of them is tokenised",
                fix="send prompt, or messages",
                param="prompt",
            )
        if asked.messages is not None:
            chat = ChatRequest(
                messages=asked.messages, tools=asked.tools, tool_choice=asked.tool_choice,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message, chat_template_kwargs=asked.chat_template_kwargs,
            )  # fmt: skip
            given, special = render(chat, service.served, offer(chat, service.served.tool_parser)).text, False
        texts = [given] if isinstance(given, str) else given or []
        bounds.batch(map(num_tokens, texts), "prompt")
        ids = await service.encode(texts, special)
        one = isinstance(given, str)
        answer: dict[str, Any] = {
            "tokens": await long_list(ids[0] if one else ids),
            "count": len(ids[0]) if one else [len(each) for each in ids],
            "max_model_len": service.served.context_length,
        }
        if asked.return_token_strs:
            spell = functools.cache(tokenizer.token_text)
            work = lambda: [[spell(token) for token in each] for each in ids]
            names = await service.beside_the_loop(work, sum(map(len, ids)))
            answer["token_strs"] = await long_list(names[0] if one else names)
        return json_reply(answer, headers=body.headers())

    return handle


def detokenize(service: Service) -> Handler:
    """POST /detokenize."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, DetokenizeRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        tokenizer = _tokenizer(service)
        given = asked.tokens if asked.tokens is not None else asked.input_ids
        if given is None:
            raise InvalidRequest(what="tokens is missing", why="it is required", fix="send tokens", param="tokens")
        many = set(map(type, given)) == {list}
        lists: list[Any] = given if many else [given]
        bounds.batch(map(len, lists), "tokens")
        skip = asked.skip_special_tokens is not False
        work = lambda: [tokenizer.decode_long(_ids(each, tokenizer), skip) for each in lists]
        texts = await service.beside_the_loop(work, sum(map(len, lists)))
        return json_reply(
            {"prompt": texts if many else texts[0], "text": texts if many else texts[0]}, headers=body.headers()
        )

    return handle


def abort_request(service: Service) -> Handler:
    """POST /abort_request: aborts the caller's requests with exactly this id; with the admin key those of any caller,
    or all requests."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, AbortRequest, most=server.max_body_bytes, strict=server.strict_api)
        caller = caller_of(request)
        if body.value.abort_all:
            if not caller.admin:
                raise Forbidden(
                    what="abort_all needs the admin key",
                    why="it ends other people's requests",
                    fix="send a rid instead",
                )
            return json_reply({"success": True, "aborted": await service.engine_client.abort_everywhere()})
        if not body.value.rid:
            raise InvalidRequest(what="rid is missing", why="it says which request to end", fix="send rid", param="rid")
        aborted = await service.engine_client.abort_everywhere(
            body.value.rid, tenant=None if caller.admin else caller.tenant
        )
        return json_reply({"success": True, "aborted": aborted}, headers=body.headers())

    return handle


class JoinRequest(msgspec.Struct, kw_only=True):
    """POST /concate_and_append_request. The requests have ended, with a rid of theirs and max_new_tokens 0."""

    src_rids: list[str]
    """Branches, in order: each begins with the prompt of `dst_rid`."""
    dst_rid: str
    position_ids_offset: list[int] | None = None
    """Position offset of each branch relative to the end of the one before it."""
    cache_salt: str | None = None
    extra_key: str | None = None


def concate_and_append(service: Service) -> Handler:
    """POST /concate_and_append_request: appends the KV of branches to their parent's without computing anything. Later
    requests continue it with `session_params: {"id": session_id}`.
    """
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, JoinRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        namespace = namespace_of(asked.cache_salt or "", asked.extra_key or "")
        ask = parse_join(msgspec.structs.asdict(asked))
        joined = await service.engine_client.joins.join(ask, namespace, caller_of(request))
        return json_reply(joined, headers=body.headers())

    return handle


def flush_cache(service: Service) -> Handler:
    """POST /flush_cache: empties the prefix cache; 409 while requests are running; with `?timeout=` it waits for them
    that number of seconds first."""

    async def handle(request: Request) -> Response:
        give_up = time.monotonic() + _patience(request.query_params.get("timeout", "0"))
        while True:
            try:
                return json_reply({"success": True, **await service.engine_client.flush_cache()})
            except Conflict:
                left = give_up - time.monotonic()
                if left <= 0:
                    raise
                await client_of(request).wait_for(asyncio.sleep(min(left, _ASK_AGAIN_S)))

    return handle


def _patience(given: str) -> float:
    """The timeout of a query, in seconds."""
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_PATIENCE_S:
        raise InvalidRequest(
            what=f"timeout is {given[:40]!r}",
            why=f"it must be 0 to {_MOST_PATIENCE_S:g} seconds",
            fix="send a valid timeout, or leave it out",
            param="timeout",
        )
    return seconds


def _deadline_ms(data: dict[str, Any]) -> float | None:
    """Takes `deadline_ms` out of the body, because it concerns this call and not the answer."""
    given = data.pop("deadline_ms", None)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
        raise InvalidRequest(
            what=f"deadline_ms is {str(given)[:40]!r}",
            why="it must be a number",
            fix="send milliseconds, or leave it out",
            param="deadline_ms",
        )
    return given


def _known(data: dict[str, Any], *, strict: bool) -> CheckedBody[dict[str, Any]]:
    ignored = unknown_fields(data, NATIVE_FIELDS, strict=strict)
    for name in ignored:
        del data[name]
    return CheckedBody(data, ignored)


async def _answers(service: Service, batch: NativeBatch) -> list[dict[str, Any]]:
    return [_render(service, batch, {}, each, incremental=False) for each in await service.collect(batch.requests)]


async def _events(service: Service, batch: NativeBatch) -> Events:
    renderers: dict[int, NativeAnswer] = {}
    incremental = service.config.server.incremental_streaming_output
    first = [0]
    for each in batch.requests:
        first.append(first[-1] + each.sampling.n)
    async with contextlib.aclosing(service.run(batch.requests)) as news:
        async for item in news:
            at, stream, _ = item
            answer = _render(service, batch, renderers, item, incremental=incremental)
            if not batch.one_answer:
                answer["index"] = first[at] + stream.index
            yield event(answer)
    yield DONE


def _render(
    service: Service, batch: NativeBatch, renderers: dict[int, NativeAnswer], news: News, *, incremental: bool
) -> dict[str, Any]:
    at, stream, delta = news
    raise_if_failed(delta.end)
    renderer = renderers.get(stream.id)
    if renderer is None:
        text = service.served.tokenizer is not None
        version = service.config.server.weight_version
        renderer = NativeAnswer(stream, batch.requests[at], incremental=incremental, text=text, weight_version=version)
        renderers[stream.id] = renderer
    return renderer.add(delta)


def _tokenizer(service: Service) -> Tokenizer:
    if service.served.tokenizer is None:
        raise InvalidRequest(
            what="this server has no tokenizer",
            why="it was started with --skip-tokenizer-init",
            fix="tokenise on your side",
        )
    return service.served.tokenizer


def _ids(given: list[Any], tokenizer: Tokenizer) -> list[int]:
    size = tokenizer.vocab_size
    for each in given:
        if not isinstance(each, int) or not 0 <= each < size:
            raise no_such_token(f"tokens has {str(each)[:40]!r}", size, param="tokens")
    return given
