"""Media from the web, under guard. One hop: the name is checked, looked up once, its addresses are checked, and one of those
is connected to, so that a name that changes its mind gains nothing. Every redirect is a hop of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

from bough.multimodal.address import WebAddress, parse_web
from bough.multimodal.allowed import AllowList
from bough.multimodal.errors import MediaNotAllowed, MediaUnreachable
from bough.multimodal.local import too_many_bytes
from bough.multimodal.look_up import Resolve, look_up

MAX_REDIRECTS = 3
_MOVED = frozenset({301, 302, 303, 307, 308})


async def fetch(
    url: str, allowed: AllowList, *, most_bytes: int, timeout_s: float, resolve: Resolve = look_up
) -> bytes:
    """What is at `url`, redirects followed. Raises `MediaError`; never takes longer than `timeout_s` in all."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _follow(parse_web(url), allowed, most_bytes, resolve)
    except (TimeoutError, httpcore.TimeoutException) as error:
        raise MediaUnreachable(
            what="this URL was not fetched in time",
            why=f"{timeout_s:g} s are allowed",
            fix="send the bytes as a data: URL",
        ) from error
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError) as error:
        raise MediaUnreachable(
            what="this URL can't be fetched", why="its server does not answer as one should", fix="check it"
        ) from error


async def _follow(at: WebAddress, allowed: AllowList, most_bytes: int, resolve: Resolve) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        _check_name(at, allowed)
        found = await _one_hop(at, allowed, most_bytes, resolve)
        if isinstance(found, bytes):
            return found
        if at.scheme == "https" and found.scheme != "https":
            raise MediaNotAllowed(what="this URL leads from https to http", fix="name the final URL")
        at = found
    raise MediaUnreachable(
        what="this URL leads on and on", why=f"at most {MAX_REDIRECTS} redirects are followed", fix="name the final URL"
    )


async def _one_hop(at: WebAddress, allowed: AllowList, most_bytes: int, resolve: Resolve) -> bytes | WebAddress:
    """The body, or where to go next."""
    pool = httpcore.AsyncConnectionPool(
        ssl_context=ssl.create_default_context() if at.scheme == "https" else None,
        max_connections=1,
        max_keepalive_connections=0,
        http2=False,
        network_backend=_Guarded(allowed, resolve),
    )
    where = httpcore.URL(scheme=at.scheme, host=at.host, port=at.port, target=at.target)
    headers = [("accept", "image/*, video/*, audio/*"), ("accept-encoding", "identity"), ("user-agent", "bough")]
    async with pool, pool.stream("GET", where, headers=headers) as response:
        by_name = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _MOVED and b"location" in by_name:
            return at.moved(by_name[b"location"])
        if response.status != 200:
            raise MediaUnreachable(
                what="this URL can't be fetched", why=f"its server answered {response.status}", fix="check it"
            )
        if by_name.get(b"content-encoding", "identity") != "identity":
            raise MediaUnreachable(
                what="this URL can't be fetched", why="its server packs what it sends", fix="check it"
            )
        said = by_name.get(b"content-length", "0")
        if said.isdigit() and len(said) < 20 and int(said) > most_bytes:
            raise too_many_bytes(most_bytes)
        body = bytearray()
        async for piece in response.aiter_stream():
            body += piece
            if len(body) > most_bytes:
                raise too_many_bytes(most_bytes)
        return bytes(body)


def _check_name(at: WebAddress, allowed: AllowList) -> None:
    if allowed.empty:
        raise MediaNotAllowed(
            what="this server fetches no media from the web",
            why="it was started without --allowed-media-domains",
            fix="send the bytes as a data: URL",
        )
    if not allowed.has_name(at.host):
        raise MediaNotAllowed(
            what=f"media from {at.host} are not fetched",
            why="the server was not started with it among its --allowed-media-domains",
            fix="send the bytes as a data: URL",
        )


class _Guarded(httpcore.AsyncNetworkBackend):
    """The only way to a connection: to an address that was checked."""

    def __init__(self, allowed: AllowList, resolve: Resolve) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = []
        # One that is not allowed spoils all: who mixes them is up to something.
        if not addresses or not all(self._allowed.has_address(address) for address in addresses):
            raise MediaNotAllowed(
                what=f"nothing is fetched from {host}",
                why="it has no public address",
                fix="send the bytes as a data: URL",
            )
        for last, address in enumerate(addresses, start=1 - len(addresses)):
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.ConnectError:
                if last == 0:
                    raise
        raise AssertionError("there is an address")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise MediaNotAllowed(what="media are not fetched from sockets")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
