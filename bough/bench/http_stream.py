"""A cheap HTTP/1.1 client: sends bodies as bytes, and passes on pieces of answers as soon as they arrive. General
clients spend more time per streamed token than a fast server; a load generator must not.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bough.core.errors import BoughError, ConfigError, Unavailable

OnData = Callable[[bytes], None]
_CONNECT_S = 30.0


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.open = False
        self.keep_alive = True
        self.answered = False
        self._parser: Any = None
        self._on_data: OnData | None = None
        self._done: asyncio.Future[int] | None = None

    async def exchange(self, request: bytes, on_data: OnData) -> int:
        """Sends a request; `on_data` gets the body's pieces. Returns the status once the body is complete.

        Raises `ConnectionError` if the connection ends first; `answered` says whether any byte had come.
        """
        if self.transport is None or not self.open:
            raise ConnectionResetError("the connection is closed")
        self.answered = False
        self._on_data = on_data
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._done

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    # -- asyncio's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        self.open = True

    def data_received(self, data: bytes) -> None:
        self.answered = True
        if self._parser is None:
            self.close()  # an answer without a request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"this is no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._fail(ConnectionResetError(str(error) if error else "the server closed the connection"))

    # -- the parser's side -----------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        assert self._on_data is not None
        self._on_data(body)

    def on_message_complete(self) -> None:
        parser, self._parser = self._parser, None
        self.keep_alive = parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class StreamingClient:
    """A pool of connections to one server."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                what=f"{base_url!r} is no server's address",
                why="it must look like http://host:port",
                fix="for example --base-url http://127.0.0.1:30000",
            )
        self.base_url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._prefix = parts.path.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        lines = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[Connection] = []

    async def request(self, method: str, path: str, body: bytes, on_data: OnData) -> int:
        """One exchange; returns the status. A kept connection that turns out closed is replaced once."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        while True:
            fresh = not self._idle
            connection = await self._connect() if fresh else self._idle.pop()
            try:
                status = await connection.exchange(head.encode() + body, on_data)
            except ConnectionError:
                if fresh or connection.answered:
                    raise
                continue
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.keep_alive and connection.open:
                self._idle.append(connection)
            else:
                connection.close()
            return status

    async def call(self, method: str, path: str, fields: object = None) -> Any:
        """One exchange of JSON. Raises `Unavailable` if there is no answer, `BoughError` if the answer is an error."""
        pieces: list[bytes] = []
        body = b"" if fields is None else msgspec.json.encode(fields)
        try:
            status = await self.request(method, path, body, pieces.append)
        except OSError as error:
            raise self.unreachable(error) from error
        text = b"".join(pieces)
        if status != 200:
            raise BoughError(
                what=f"{method} {path} was answered with status {status}",
                why=text.decode(errors="replace")[:500],
                fix="see `bough bench serve --help` for --backend and --base-url",
            )
        try:
            return msgspec.json.decode(text) if text else None
        except msgspec.DecodeError:
            return text.decode(errors="replace")

    def unreachable(self, error: OSError) -> Unavailable:
        return Unavailable(
            what=f"no server answers at {self.base_url}",
            why=str(error) or type(error).__name__,
            fix="start one with `bough serve`, or name another with --base-url",
        )

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_S):
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
