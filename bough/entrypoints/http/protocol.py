"""HTTP connections with bounds of their own: how long a client may take to send its request, and how large its head is.

uvicorn waits for ever for the end of a head or a body, and keeps every header. Here a client that sends nothing, or next
to nothing, is told so (408) and disconnected, and a head that grows too large is refused before it is complete (431).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bough.core.bounds import BOUNDS
from bough.core.errors import BoughError, InvalidRequest
from bough.entrypoints.http.errors import error_response
from bough.entrypoints.http.replies import CLIENT
from bough.entrypoints.stream import Client

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    Send = Callable[[ASGISendEvent], Coroutine[Any, Any, None]]

LEAST_BYTES_A_SECOND = 1024
"""A body that comes slower than this is not being sent in earnest."""
_MOST_BEHIND = 4
"""Requests that are read while one before them on the connection is answered."""


class TooSlow(InvalidRequest):
    status = 408
    code = "request_timeout"


class HeadTooLarge(InvalidRequest):
    status = 431
    code = "headers_too_large"


class NotHttp(InvalidRequest):
    pass


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `timeout_s` is set by `bounded`."""

    timeout_s = 30.0

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], **more: Any) -> None:
        super().__init__(config, server_state, app_state, **more)
        self._timer: asyncio.TimerHandle | None = None
        self._timed = ""
        """The part of the request that the timer is for."""
        self._part = "head"
        """What is being received: a head, a body, or nothing."""
        self._head_bytes = 0
        self._body_bytes = 0
        self._client = Client()
        self._cycles: list[RequestResponseCycle] = []
        """Requests without a whole response: the one being answered, and those behind it."""

    # -- the transport's side --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        for cycle in self._cycles:  # uvicorn itself thinks of the last one only
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        self._client.leave()

    def data_received(self, data: bytes) -> None:
        if self._part != "body":
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_is_too_large():
            self._refuse_head()
        elif not self._part:
            self._disarm()
        elif self._timer is None or self._timed != self._part:
            self._arm()

    def send_400_response(self, msg: str) -> None:
        if self._head_is_too_large():  # the parser gives up on long addresses first
            self._refuse_head()
            return
        self._refuse(NotHttp(what="the request can't be read", why="it is not HTTP/1.1", fix="check the client"))

    # -- the parser's side -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"
        self.scope[CLIENT] = self._client  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._part = "body"
        self._head_bytes = self._body_bytes = 0
        if self.cycle is not None:
            self._cycles = [*(each for each in self._cycles if not each.response_complete), self.cycle]
            if self.scope["http_version"] == "1.0":
                self.cycle.send = _unframed(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._part = ""
        super().on_message_complete()
        if len(self.pipeline) <= _MOST_BEHIND:
            self.flow.resume_reading()  # a large body or a request before it has paused it: the client's end must be read

    # -- time ------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._disarm()
        self._timed = self._part
        self._timer = self.loop.call_later(self.timeout_s, self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Time is up for this part of the request, unless a body is on its way at a fair pace."""
        self._timer = None
        if self.transport.is_closing():
            return
        keeps_pace = self._part == "body" and self._body_bytes >= LEAST_BYTES_A_SECOND * self.timeout_s
        if keeps_pace or self.flow.read_paused:  # nobody is late with what is not read
            self._body_bytes = 0
            self._arm()
            return
        self._refuse(
            TooSlow(
                what=f"the request's {self._part or 'head'} did not arrive",
                why=f"clients get {self.timeout_s:g} s to send it (--client-timeout-s)",
                fix="send it at once",
            )
        )

    def _head_is_too_large(self) -> bool:
        return self._part == "head" and self._head_bytes > BOUNDS["header_bytes"].most

    def _refuse_head(self) -> None:
        self._refuse(
            HeadTooLarge(
                what="the request's head is too large",
                why=f"at most {BOUNDS['header_bytes'].most} bytes are read",
                fix="send a shorter address, and fewer or shorter headers",
            )
        )

    def _refuse(self, error: BoughError) -> None:
        """Says why, where nothing else has been said, and closes the connection."""
        if not any(each.response_started and not each.response_complete for each in self._cycles) and not self.pipeline:
            reply = error_response(error)
            head = [b"HTTP/1.1 %d \r\n" % error.status]
            head += [name + b": " + value + b"\r\n" for name, value in reply.raw_headers]
            self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", bytes(reply.body)]))
        self.transport.close()


def _unframed(cycle: RequestResponseCycle) -> Send:
    """How a response of unknown length is sent to a client of HTTP/1.0, which knows no chunks: the connection's end is the
    response's."""
    framed, unframed = cycle.send, False

    async def send(message: ASGISendEvent) -> None:
        nonlocal unframed
        if message["type"] == "http.response.start":
            unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
            cycle.chunked_encoding = False if unframed else None
        elif unframed and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await framed(message)

    return send


def bounded(timeout_s: float) -> type[BoundedProtocol]:
    """The protocol with this patience."""
    return type("Bounded", (BoundedProtocol,), {"timeout_s": timeout_s})
