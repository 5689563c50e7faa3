"""Communication between API workers. Each worker listens on a Unix socket in the server's private directory. A request
that needs data of another worker (a response, a session) is forwarded to it unchanged, and its answer is returned as it
arrives. The worker that the client is connected to has authenticated it, and sends the caller along.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import quote

import httptools
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bough.core.errors import Forbidden, Unavailable
from bough.engine_client.caller import Caller
from bough.engine_client.names import random_name
from bough.entrypoints.http.errors import error_response
from bough.entrypoints.http.replies import CALLER, caller_of, client_of
from bough.entrypoints.http.security import App
from bough.entrypoints.stream import ClientGone

_log = logging.getLogger(__name__)

CALLER_HEADER = b"x-bough-caller"
"""Header with the caller; trusted only on a worker's own socket."""
SESSIONS_WORKER = 0
"""The worker that keeps all sessions, because only it serves gRPC."""
_OF_THE_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"expect"})
_NOT_PASSED_ON = _OF_THE_CONNECTION | {b"content-length", b"authorization", b"x-api-key", CALLER_HEADER}
_READ_BYTES = 65_536
_CONNECT_S = 5.0
_WORKER_DIGITS = 2
"""Number of first hexadecimal digits of a name that identify the worker which keeps the named object."""


class ResponseHead(msgspec.Struct, frozen=True):
    """The beginning of an answer."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Peers:
    """The other API workers of a server."""

    def __init__(self, own: int = 0, addresses: Mapping[int, str] | None = None) -> None:
        """`addresses`: the other workers' sockets."""
        self.own = own
        self._addresses = addresses or {}

    @property
    def others(self) -> list[int]:
        return sorted(self._addresses)

    def new_name(self) -> str:
        """An unguessable name for an object that this worker keeps."""
        return f"{self.own:0{_WORKER_DIGITS}x}{random_name()[_WORKER_DIGITS:]}"

    def keeper_of(self, name: str) -> int:
        """The worker that keeps what has this name, which ends as `new_name` makes it; this one, if no other does."""
        try:
            worker = int(name.rpartition("_")[2][:_WORKER_DIGITS], 16)
        except ValueError:
            return self.own
        return worker if worker in self._addresses else self.own

    async def exchange(
        self, worker: int, request: Request, body: bytes, *, method: str = "", path: str = ""
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Sends the request, or another of the same client, to a worker: first comes the head of the answer, then its
        pieces. Closing it early is a client that has gone away. Raises `Unavailable` if the worker can't be reached."""
        answer = _Answer()
        reader, writer = await self._connect(worker)
        try:
            writer.writelines([_head(request, len(body), method, path), body])
            has_head = False
            while not answer.complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise _gone(worker)
                answer.parser.feed_data(data)
                if answer.head is not None and not has_head:
                    has_head = True
                    yield answer.head
                for piece in answer.taken():
                    yield piece
        except (OSError, httptools.HttpParserError) as error:
            raise _gone(worker) from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(self, worker: int, request: Request, path: str) -> bytes | None:
        """A worker's answer to a GET of the same client; None if the status is not 200."""
        pieces: list[bytes] = []
        status = 0
        async with contextlib.aclosing(self.exchange(worker, request, b"", method="GET", path=path)) as replies:
            async for each in replies:
                if isinstance(each, ResponseHead):
                    status = each.status
                else:
                    pieces.append(each)
        return b"".join(pieces) if status == 200 else None

    async def _connect(self, worker: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await asyncio.open_unix_connection(self._addresses[worker])
        except (OSError, TimeoutError) as error:
            raise _gone(worker) from error


class PassedOn(Response):
    """The answer of another worker to a request, as it comes."""

    def __init__(self, peers: Peers, worker: int, request: Request, body: bytes = b"") -> None:
        super().__init__()
        self._request = request
        self._exchange = peers.exchange(worker, request, body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await client_of(self._request).wait_for(self._pass(scope, receive, send))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with contextlib.aclosing(self._exchange) as replies:
                async for each in replies:
                    if isinstance(each, ResponseHead):
                        begun = True
                        headers = [pair for pair in each.headers if pair[0] not in _OF_THE_CONNECTION]
                        await send({"type": "http.response.start", "status": each.status, "headers": headers})
                    else:
                        await send({"type": "http.response.body", "body": each, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Unavailable as error:
            if begun:  # its client sees that the connection ends too early
                _log.warning("half an answer of another API worker was lost: %s", error)
                return
            await error_response(error, path=scope["path"])(scope, receive, send)


class PeerDoor:
    """ASGI application for a worker's own socket: requests of clients that another worker has let in."""

    def __init__(self, app: App) -> None:
        """`app`: the routes, without the guard."""
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        caller = dict(scope["headers"]).get(CALLER_HEADER, b"")
        try:
            scope[CALLER] = msgspec.json.decode(caller, type=Caller)
        except msgspec.MsgspecError:
            refusal = Forbidden(
                what="no API worker sent this", why="it does not say for whom", fix="use the server's port"
            )
            await error_response(refusal)(scope, receive, send)
            return
        scope["bough.request_id"] = random_name()
        await self._app(scope, receive, send)


class _Answer:
    """An HTTP answer as it is parsed."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.head: ResponseHead | None = None
        self.complete = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []

    def taken(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.head = ResponseHead(self.parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


def _head(request: Request, num_bytes: int, method: str, path: str) -> bytes:
    scope = request.scope
    target = quote(path or scope["path"], safe="/:").encode()
    if not path and scope.get("query_string"):
        target += b"?" + scope["query_string"]
    lines = [b"%s %s HTTP/1.1" % ((method or scope["method"]).encode(), target)]
    lines += [b"%s: %s" % pair for pair in scope["headers"] if pair[0] not in _NOT_PASSED_ON]
    lines.append(b"%s: %s" % (CALLER_HEADER, msgspec.json.encode(caller_of(request))))
    return b"\r\n".join([*lines, b"connection: close", b"content-length: %d" % num_bytes, b"", b""])


def _gone(worker: int) -> Unavailable:
    return Unavailable(
        what="the part of the server that keeps this can't be reached",
        why=f"API worker {worker} has ended, or is starting",
        fix="try again in a moment",
    )
