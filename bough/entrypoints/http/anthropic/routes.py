"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from bough.engine_client import Request
from bough.entrypoints.http.anthropic.answer import MessageBody, MessageEvents, MessageForm, error_event
from bough.entrypoints.http.anthropic.convert import chat_request, hosted_tools
from bough.entrypoints.http.anthropic.schema import CountTokensRequest, MessagesRequest
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler, make_form, make_request, render
from bough.entrypoints.http.openai.fields import served_name
from bough.entrypoints.http.openai.tools import offer
from bough.entrypoints.http.replies import EventReply, client_of, json_reply, placed
from bough.entrypoints.service import Service
from bough.entrypoints.stream import Events


def messages(service: Service) -> Handler:
    """POST /v1/messages."""
    server = service.config.server

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, MessagesRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        model = served_name(service.served, asked.model)
        left_out = hosted_tools(asked, strict=server.strict_api)
        chat = chat_request(asked)
        job, offered = make_request(chat, service)
        # max_tokens is required, and clients send the largest they know; the end says what it was
        job = replace(placed(job, request), room="at_most")
        chat_form = make_form(chat, job, offered, model, served=service.served, report_cache=server.enable_cache_report)
        form = MessageForm(chat=chat_form, max_tokens=asked.max_tokens)
        headers = body.headers(*left_out, *offered.ignored)
        if asked.stream:
            return EventReply(_events(service, job, form), headers, failed=error_event)
        answer = await client_of(request).wait_for(_answer(service, job, form))
        return json_reply(answer, headers=headers)

    return handle


def count_tokens(service: Service) -> Handler:
    """POST /v1/messages/count_tokens."""
    server = service.config.server

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, CountTokensRequest, most=server.max_body_bytes, strict=server.strict_api)
        served_name(service.served, body.value.model)
        left_out = hosted_tools(body.value, strict=server.strict_api)
        chat = chat_request(body.value)
        prompt = render(chat, service.served, offer(chat, service.served.tool_parser)).text
        ids = await service.encode([prompt], False)
        return json_reply({"input_tokens": len(ids[0])}, headers=body.headers(*left_out))

    return handle


async def _answer(service: Service, job: Request, form: MessageForm) -> dict[str, Any]:
    body = MessageBody(form)
    for _, _, delta in await service.collect([job]):
        body.add(delta)
    return body.render()


async def _events(service: Service, job: Request, form: MessageForm) -> Events:
    events = MessageEvents(form)
    async with contextlib.aclosing(service.run([job])) as news:
        async for _, stream, delta in news:
            frames = events.add(delta, len(stream.prompt))
            if frames:
                yield frames
