"""How routes answer: one JSON body, or a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bough.core.errors import InvalidRequest
from bough.engine_client import Request as Job
from bough.engine_client.caller import ANYBODY, Caller
from bough.entrypoints.http.body import header
from bough.entrypoints.http.errors import error_event
from bough.entrypoints.stream import KEEP_ALIVE_S, Client, Events, send_events

_encode = msgspec.json.Encoder().encode
_LONGEST_S = 864_000.0
_PIECE = 65_536
"""Number of list members that are encoded at once."""
CLIENT = "bough.client"
"""Key of a request's scope for its `Client`."""
CALLER = "bough.caller"
"""Key of a request's scope for its `Caller`, which the guard sets."""


def json_reply(payload: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(payload), status_code=status, headers=dict(headers or {}), media_type="application/json")


async def long_list(values: Sequence[Any]) -> object:
    """A list for `json_reply`, lists in it included: if it is long, as the JSON that it is, made in pieces, since encoding
    it at once would stop everything else for a while."""
    if values and isinstance(values[0], list):
        if sum(map(len, values)) <= _PIECE:
            return values
        return msgspec.Raw(b"[%s]" % b",".join([bytes(await _encoded(each)) for each in values]))
    return values if len(values) <= _PIECE else msgspec.Raw(await _encoded(values))


async def _encoded(values: Sequence[Any]) -> bytes:
    pieces: list[bytes] = []
    for at in range(0, len(values), _PIECE):
        pieces.append(_encode(values[at : at + _PIECE])[1:-1])
        await asyncio.sleep(0)
    return b"[%s]" % b",".join(pieces)


class EventReply(Response):
    """Streams events. The status line waits for the first of them, so that early errors are plain HTTP errors."""

    media_type = "text/event-stream"
    keep_alive_s = KEEP_ALIVE_S

    def __init__(
        self,
        events: Events,
        headers: Mapping[str, str] | None = None,
        *,
        failed: Callable[[BaseException, str], bytes] = error_event,
    ) -> None:
        """`failed` renders an error that comes when the stream is already open, in the words of the path it is given."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_events(
            self._events, headers=self.raw_headers, client=_client(scope), send=send,
            failed=lambda error: self._failed(error, Request(scope).url.path), keep_alive_s=self.keep_alive_s,
        )  # fmt: skip


class LinesReply(EventReply):
    """Streams JSON objects, one a line."""

    media_type = "application/x-ndjson"
    keep_alive_s = 1e7  # a line that says nothing would be no JSON


def deadline_of(request: Request, field_ms: float | None = None) -> float:
    """Time (time.monotonic()) by which the client wants its answer, or 0: `x-deadline-ms` or `x-request-timeout-s`
    among the headers, or the body's `deadline_ms`; the earliest is used. Raises `InvalidRequest` for an invalid
    time."""
    given = {
        "x-deadline-ms": (header(request, b"x-deadline-ms"), 1e-3),
        "x-request-timeout-s": (header(request, b"x-request-timeout-s"), 1.0),
        "deadline_ms": (field_ms, 1e-3),
    }
    seconds = [_seconds(name, value, unit) for name, (value, unit) in given.items() if value is not None]
    return time.monotonic() + min(seconds) if seconds else 0.0


def _seconds(name: str, value: str | float, unit: float) -> float:
    try:
        seconds = float(value) * unit
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds < _LONGEST_S:
        raise InvalidRequest(
            what=f"{name} is {str(value)[:40]!r}",
            why="it must be a positive number, at most ten days",
            fix="send the time that the answer may take, or leave it out",
            param=name,
        )
    return seconds


def client_of(request: Request) -> Client:
    """The receiver of the answer."""
    return _client(request.scope)


def _client(scope: Scope) -> Client:
    """The connection's; a caller inside the process cancels the call instead of disconnecting."""
    client: Client | None = scope.get(CLIENT)
    return client or Client()


def caller_of(request: Request) -> Caller:
    """The sender of the request."""
    caller: Caller = request.scope.get(CALLER, ANYBODY)
    return caller


def tenant_of(request: Request) -> str:
    """The tenant, which owns everything that the request creates or may access."""
    return caller_of(request).tenant


def placed(job: Job, request: Request, *, deadline_ms: float | None = None) -> Job:
    """A body's request with the caller and the deadline of the HTTP request. Raises `InvalidRequest`."""
    return replace(job, caller=caller_of(request), deadline_s=deadline_of(request, deadline_ms))
