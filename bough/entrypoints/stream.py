"""Server-sent events: how they look, and how one response is sent while its client is still there.

The first event is awaited before the status line goes out, so that a request that fails at once is an HTTP error and not
a broken stream. If it takes long, the stream opens anyway and keep-alive comments hold the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import msgspec

from bough.core.errors import BoughError

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Events = AsyncGenerator[bytes, None]

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 15.0

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed its connection: no answer can be sent."""


def event(payload: object) -> bytes:
    """One `data:` event with a JSON payload."""
    return b"data: " + _encode(payload) + b"\n\n"


class Client:
    """The receiver of answers: one connection, or a caller inside the process. Use within one event loop."""

    __slots__ = ("_gone", "_waited_for")

    def __init__(self) -> None:
        self._gone = False
        self._waited_for: set[asyncio.Task[Any]] = set()

    def leave(self) -> None:
        """Marks the client as disconnected: work for it ends."""
        self._gone = True
        for task in self._waited_for:
            task.cancel()

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end and returns its result. If the client goes away first, cancels it (which aborts the
        request it waits for) and raises `ClientGone`."""
        if self._gone:
            work.close()
            raise ClientGone
        here = asyncio.current_task()
        assert here is not None, "a coroutine runs in a task"
        self._waited_for.add(here)
        try:
            return await work
        except asyncio.CancelledError:
            if self._gone and not here.uncancel():
                raise ClientGone from None
            raise
        finally:
            self._waited_for.discard(here)


async def send_events(
    events: Events,
    *,
    headers: list[tuple[bytes, bytes]],
    client: Client,
    send: Send,
    failed: Callable[[BaseException], bytes],
    keep_alive_s: float = KEEP_ALIVE_S,
) -> None:
    """Sends a whole event stream.

    Raises what the first event raised if it comes before the stream is open; later errors become the event that
    `failed` renders. The caller sends the stream's end (`DONE` is an ordinary event). On disconnection the iterator is
    closed, which aborts its request.
    """
    stream = _Stream(events, headers, send, failed)
    keeper = asyncio.ensure_future(stream.keep_alive(keep_alive_s))
    try:
        with contextlib.suppress(ClientGone):
            await client.wait_for(stream.run())
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await stream.close()


class _Stream:
    def __init__(
        self,
        events: Events,
        headers: list[tuple[bytes, bytes]],
        send: Send,
        failed: Callable[[BaseException], bytes],
    ) -> None:
        self._events = events
        self._headers = headers
        self._send = send
        self._failed = failed
        self._opened = False
        self._sent = 0

    async def run(self) -> None:
        """Opens the stream with its first event and sends the rest; ends the response."""
        try:
            async for chunk in self._events:
                await self._open()
                self._sent += 1
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not self._opened:
                raise
            if not isinstance(error, BoughError):
                _log.exception("a stream failed")
            await self._send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        await self._open()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, every_s: float) -> None:
        """Sends a comment whenever nothing else was sent for a while."""
        while True:
            sent = self._sent
            await asyncio.sleep(every_s)
            if sent == self._sent:
                await self._open()
                await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _open(self) -> None:
        if not self._opened:
            self._opened = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def close(self) -> None:
        """Closes the iterator, so that an unfinished request is aborted now and not at the next garbage collection."""
        await self._events.aclose()
