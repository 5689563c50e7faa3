"""How routes answer: one JSON body, or a stream of events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bough.entrypoints.http.errors import error_event
from bough.entrypoints.stream import KEEP_ALIVE_S, Events, send_events

_encode = msgspec.json.Encoder().encode


def json_reply(payload: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(payload), status_code=status, headers=dict(headers or {}), media_type="application/json")


class EventReply(Response):
    """Streams events. The status line waits for the first of them, so that early errors are plain HTTP errors."""

    media_type = "text/event-stream"
    keep_alive_s = KEEP_ALIVE_S

    def __init__(
        self,
        events: Events,
        headers: Mapping[str, str] | None = None,
        *,
        failed: Callable[[BaseException], bytes] = error_event,
    ) -> None:
        """`failed` renders an error that comes when the stream is already open."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_events(
            self._events, headers=self.raw_headers, receive=receive, send=send, failed=self._failed,
            keep_alive_s=self.keep_alive_s,
        )  # fmt: skip


class LinesReply(EventReply):
    """Streams JSON objects, one a line."""

    media_type = "application/x-ndjson"
    keep_alive_s = 1e7  # a line that says nothing would be no JSON


def deadline_of(request: Request) -> float:
    """Wall-clock time by which the client wants its answer (`x-request-timeout-s`), or 0."""
    given = request.headers.get("x-request-timeout-s", "")
    try:
        seconds = float(given) if given else 0.0
    except ValueError:
        return 0.0
    return time.time() + seconds if 0 < seconds < 1e6 else 0.0


def tenant_of(request: Request) -> str:
    """Cache namespace of the client under --isolate-cache; empty otherwise."""
    tenant: Any = request.scope.get("bough.tenant", "")
    return str(tenant)


def within_tenant(tenant: str, namespace: str) -> str:
    """A cache namespace within a tenant's own."""
    return f"{tenant}\n{namespace}" if tenant else namespace
