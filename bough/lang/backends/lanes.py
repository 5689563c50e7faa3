"""A connection pool for many requests at a time.

httpx's own pool looks at all of its connections whenever a request begins or ends: with hundreds of them that takes
longer than the request. Here every connection is a lane of its own, and a request takes one that is free.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import httpx


class LaneTransport(httpx.AsyncBaseTransport):
    """Opens as many connections as there are requests at a time; the caller bounds those."""

    def __init__(self, tls: ssl.SSLContext, keepalive_s: float) -> None:
        self._tls = tls
        self._limits = httpx.Limits(max_connections=1, keepalive_expiry=keepalive_s)
        self._free: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        lane = self._free.pop() if self._free else httpx.AsyncHTTPTransport(verify=self._tls, limits=self._limits)
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            await lane.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        body = _LaneBody(response.stream, lane, self._free)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=body, extensions=response.extensions
        )

    async def aclose(self) -> None:
        while self._free:
            await self._free.pop().aclose()


class _LaneBody(httpx.AsyncByteStream):
    """A reply's body; when it is closed its lane is free again."""

    def __init__(
        self, body: httpx.AsyncByteStream, lane: httpx.AsyncHTTPTransport, free: list[httpx.AsyncHTTPTransport]
    ) -> None:
        self._body = body
        self._lane: httpx.AsyncHTTPTransport | None = lane
        self._free = free

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()
        if self._lane is not None:
            self._free.append(self._lane)
            self._lane = None
