"""POST /parse_function_call and /separate_reasoning: the server's parsers for texts from clients."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import InvalidRequest
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.openai.schema import Tool
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.service import Service
from bough.parsers import parse_tool_calls, separate_reasoning as separated


class ParseCallRequest(msgspec.Struct, kw_only=True):
    """POST /parse_function_call."""

    text: str
    tools: list[Tool]
    tool_call_parser: str | None = None
    """None: the served model's."""


class SeparateReasoningRequest(msgspec.Struct, kw_only=True):
    """POST /separate_reasoning."""

    text: str
    reasoning_parser: str | None = None
    """None: the served model's."""


def parse_function_call(service: Service) -> Handler:
    """The calls in a whole text, and what is left of it."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, ParseCallRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        name = _named(asked.tool_call_parser, service.served.tool_parser, "tool_call_parser")
        found = parse_tool_calls(asked.text, msgspec.to_builtins(asked.tools), name)
        calls = [
            {"tool_index": at, "name": call.name, "parameters": call.arguments}
            for at, call in enumerate(found.tool_calls)
        ]
        return json_reply({"normal_text": found.content, "calls": calls}, headers=body.headers())

    return handle


def separate_reasoning(service: Service) -> Handler:
    """A whole text as its reasoning and its answer."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, SeparateReasoningRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        name = _named(asked.reasoning_parser, service.served.reasoning_parser, "reasoning_parser")
        found = separated(asked.text, name)
        return json_reply({"reasoning_text": found.reasoning, "text": found.content}, headers=body.headers())

    return handle


def _named(asked: str | None, served: str | None, param: str) -> str:
    name = asked or served
    if name is None:
        raise InvalidRequest(
            what=f"{param} is missing", why="the served model has no such format", fix=f"send {param}", param=param
        )
    return name
