"""HTTP connections with limits: the time that a client may take to send its request, and the size of its headers.

uvicorn waits forever for the end of a head or a body, and keeps every header and every trailer. Here a client that
sends nothing, or too slowly, gets a 408 and is disconnected, and a head or trailers that grow too large are refused
before they are complete (431). Trailers are dropped: what comes after a body is no part of the head that was checked
before it.

A body's time: a client has `timeout_s` of credit. Time that passes takes from it, and every byte that arrives gives
back what it takes at `LEAST_BYTES_A_SECOND`, up to the full credit. So a client that stops is disconnected exactly
`timeout_s` after its last byte, one that keeps the rate never, and one that sends very slowly almost as soon as one
that stops.
"""

from __future__ import annotations

import asyncio
import logging
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

_log = logging.getLogger(__name__)

LEAST_BYTES_A_SECOND = 16 * 1024
"""Minimum rate of a body over a longer time; a bad mobile connection has four times that."""
_MOST_BEHIND = 4
"""Maximum number of pipelined requests that are read while an earlier one is answered."""
_MOST_UNREAD_BYTES = 64 * 1024 * 1024
"""Bytes of a body that are read and dropped after the answer was sent, so that the client can read the answer."""
_LINE_BYTES = 4
"""What separates a header's name from its value, and it from the next."""


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
        """Received since the head began, its end not found."""
        self._header_bytes = 0
        """Of the address and the headers that were found, or of the trailers behind the body."""
        self._body_bytes = 0
        self._quiet_bytes = 0
        """Received within a body since its last byte: trailers, or what else is none of it."""
        self._unread_bytes = 0
        self._too_large = False
        self._credit_s = 0.0
        self._paced_s = 0.0
        """When `_credit_s` was worked out, by the loop's clock."""
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
        part, body_bytes = self._part, self._body_bytes
        if part != "body":
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        same_body = part == self._part == "body" and body_bytes == self._body_bytes
        self._quiet_bytes = self._quiet_bytes + len(data) if same_body else 0
        if self._head_is_too_large() or self._quiet_bytes > BOUNDS["header_bytes"].most:
            self._refuse_head()
        elif not self._part:
            self._disarm()
        elif self._timer is None or self._timed != self._part:
            self._arm()

    def send_400_response(self, msg: str) -> None:
        if self._too_large or self._head_is_too_large():  # the parser gives up on long addresses first
            self._refuse_head()
            return
        self._refuse(NotHttp(what="the request can't be read", why="it is not HTTP/1.1", fix="check the client"))

    # -- the parser's side -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"
        self.scope[CLIENT] = self._client  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or, behind the body, a trailer."""
        self._count_header(len(name) + len(value) + _LINE_BYTES)
        if self._part == "head":
            super().on_header(name, value)

    def _count_header(self, num_bytes: int) -> None:
        """Raises if there are too many; the parser stops then, and `send_400_response` is called."""
        self._header_bytes += num_bytes
        if self._header_bytes > BOUNDS["header_bytes"].most:
            self._too_large = True
            raise ValueError("the head is too large")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._part = "body"
        self._head_bytes = self._header_bytes = self._body_bytes = self._unread_bytes = 0
        self._credit_s, self._paced_s = self.timeout_s, self.loop.time()
        if self.cycle is not None:
            self._cycles = [*(each for each in self._cycles if not each.response_complete), self.cycle]
            if self.scope["http_version"] == "1.0":
                self.cycle.send = _unframed(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        now = self.loop.time()
        left_s = self._credit_s - (now - self._paced_s) + len(body) / LEAST_BYTES_A_SECOND
        self._credit_s, self._paced_s = min(self.timeout_s, left_s), now
        super().on_body(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
            if self._unread_bytes > _MOST_UNREAD_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        self._part = ""
        self._header_bytes = 0
        super().on_message_complete()
        if len(self.pipeline) <= _MOST_BEHIND:
            self.flow.resume_reading()  # a large body or a request before it has paused it: the client's end must be read

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as it is, over HTTP/1.1."""
        _log.info("a client asked for another protocol than HTTP/1.1, which is not spoken here")

    # -- time ------------------------------------------------------------------------------------------------------

    def _arm(self, after_s: float | None = None) -> None:
        self._disarm()
        self._timed = self._part
        self._timer = self.loop.call_later(self.timeout_s if after_s is None else after_s, self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Disconnects a client whose time is up, unless its body arrives at a sufficient rate."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # a client is not late while the server does not read
            self._credit_s, self._paced_s = self.timeout_s, self.loop.time()
        if self._part == "body":
            left_s = self._paced_s + self._credit_s - self.loop.time()
            if left_s > 0:
                self._arm(left_s)
                return
        pace = f", and then {LEAST_BYTES_A_SECOND} bytes a second" if self._part == "body" else ""
        self._refuse(
            TooSlow(
                what=f"the request's {self._part or 'head'} did not arrive",
                why=f"clients get {self.timeout_s:g} s to send it (--client-timeout-s){pace}",
                fix="send it at once",
            )
        )

    def _head_is_too_large(self) -> bool:
        return self._part == "head" and self._head_bytes > BOUNDS["header_bytes"].most

    def _refuse_head(self) -> None:
        self._refuse(
            HeadTooLarge(
                what=f"the request's {'trailers are' if self._part == 'body' else 'head is'} too large",
                why=f"at most {BOUNDS['header_bytes'].most} bytes are read",
                fix="send a shorter address, and fewer or shorter headers",
            )
        )

    def _refuse(self, error: BoughError) -> None:
        """Sends an error, if no response has begun, and closes the connection."""
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
    """The protocol class with this timeout."""
    return type("Bounded", (BoundedProtocol,), {"timeout_s": timeout_s})
