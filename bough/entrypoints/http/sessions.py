"""POST /open_session and /close_session."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.engine_client.sessions import TIMEOUT_S
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.peers import SESSIONS_WORKER, PassedOn
from bough.entrypoints.http.replies import json_reply, tenant_of
from bough.entrypoints.service import Service

_MOST_TIMEOUT_S = 30 * 24 * 3600


class OpenSessionRequest(msgspec.Struct, kw_only=True):
    """POST /open_session."""

    capacity_of_str_len: int | None = None
    """Tokens that a request of the session may have with what came before it; none: what fits the context."""
    session_id: str | None = None
    """Made by the server if not given."""
    timeout: float | None = None
    """Seconds without a request after which the session is closed."""
    streaming: bool | None = None


class CloseSessionRequest(msgspec.Struct, kw_only=True):
    """POST /close_session."""

    session_id: str


def open_session(service: Service) -> Handler:
    """Answers with the session's id, a JSON text."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, OpenSessionRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        if asked.streaming:
            raise InvalidRequest(
                what="streaming sessions are not supported",
                why="a session's tokens are found in the prefix cache, not held in the engine",
                fix="leave streaming out",
                param="streaming",
            )
        bounds.at_most("rid_chars", len(asked.session_id or ""), "session_id")
        _within("capacity_of_str_len", asked.capacity_of_str_len, 1, 2**31 - 1)
        _within("timeout", asked.timeout, 0.001, _MOST_TIMEOUT_S)
        elsewhere = where_sessions_are(service, request, asked)
        if elsewhere is not None:
            return elsewhere
        opened = service.engine_client.sessions.open(
            asked.session_id or "",
            capacity=asked.capacity_of_str_len or 2**31 - 1,
            timeout_s=TIMEOUT_S if asked.timeout is None else asked.timeout,
            tenant=tenant_of(request),
        )
        return json_reply(opened, headers=body.headers())

    return handle


def close_session(service: Service) -> Handler:
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, CloseSessionRequest, most=server.max_body_bytes, strict=server.strict_api)
        elsewhere = where_sessions_are(service, request, body.value)
        if elsewhere is not None:
            return elsewhere
        service.engine_client.sessions.close(body.value.session_id, tenant_of(request))
        return json_reply({"success": True}, headers=body.headers())

    return handle


def where_sessions_are(service: Service, request: Request, asked: object) -> Response | None:
    """Forwards a request to the worker that keeps the sessions, if that is another one, and returns its answer."""
    peers = service.peers
    if peers is None or peers.own == SESSIONS_WORKER:
        return None
    return PassedOn(peers, SESSIONS_WORKER, request, msgspec.json.encode(asked))


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(
            what=f"{name} is {value}", why=f"it must be {low:,} to {high:,}", fix=f"send a valid {name}", param=name
        )
