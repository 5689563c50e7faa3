"""HTTP with a limited number of connections, clear errors and server-sent events; one client per event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from bough.lang.errors import BackendError
from bough.lang.loop import run_sync

if TYPE_CHECKING:
    import httpx

_RETRY_STATUS = (408, 429, 500, 502, 503, 504, 529)
_KEEPALIVE_S = 3.0
_STALE_WITHIN_S = 1.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class HttpClient:
    """Requests to one base URL. Callers beyond `max_connections` wait here, in order, holding no socket."""

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        verify: bool | str = True,
        max_connections: int = 512,
        retries: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self._verify = verify
        self._max_connections = max_connections
        self._retries = retries
        self._timeout_s = timeout_s
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]] = {}
        self._lock = threading.Lock()
        """Protects the clients: loops run in separate threads."""

    async def get(self, path: str) -> Any:
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The decoded JSON body of the reply; text where it is not JSON."""
        return await self._json("POST", path, body)

    async def sse(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The decoded `data:` of each server-sent event, up to `[DONE]`."""
        async with self._response("POST", path, body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict) and event.get("error"):
                    raise self._refused(response.status_code, data)
                yield event

    def close(self) -> None:
        """Close the connections of the shared loop; those of a loop that has ended go when the next one comes."""
        run_sync(self._aclose())

    async def _aclose(self) -> None:
        with self._lock:
            pair = self._clients.pop(asyncio.get_running_loop(), None)
        if pair is not None:
            await pair[0].aclose()

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._response(method, path, body) as response:
            content = await response.aread()
        try:
            return json.loads(content)
        except ValueError:
            return content.decode(errors="replace")

    @asynccontextmanager
    async def _response(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx.Response]:
        """A response with a successful status; connection errors and other statuses become `BackendError`."""
        import httpx

        client, slots = self._client()
        url = self.base_url + path
        async with slots:
            try:
                response = await self._send(client, method, url, body)
                try:
                    if response.status_code >= 400:
                        raise self._refused(response.status_code, (await response.aread()).decode(errors="replace"))
                    yield response
                finally:
                    await response.aclose()
            except httpx.HTTPError as error:
                raise BackendError(
                    what=f"no answer from {url}",
                    why=f"{type(error).__name__}: {error}".rstrip(": "),
                    fix="check that the server runs there and is ready (GET /health)",
                ) from error

    async def _send(
        self, client: httpx.AsyncClient, method: str, url: str, body: Mapping[str, Any] | None
    ) -> httpx.Response:
        """Send a request; retry if the server had closed the idle connection, or reports that it is busy."""
        import httpx

        content: dict[str, Any] = {"json": body} if body is not None else {}
        attempt = 0
        may_be_stale = True
        while True:
            began = time.monotonic()
            try:
                response = await client.send(client.build_request(method, url, **content), stream=True)
            except (httpx.RemoteProtocolError, httpx.WriteError):
                if not may_be_stale or time.monotonic() - began > _STALE_WITHIN_S:
                    raise
                may_be_stale = False
                continue
            if response.status_code not in _RETRY_STATUS or attempt >= self._retries:
                return response
            await response.aclose()
            await asyncio.sleep(retry_delay_s(response.headers.get("retry-after"), attempt))
            attempt += 1

    def _client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        import httpx

        loop = asyncio.get_running_loop()
        with self._lock:
            pair = self._clients.get(loop)
        if pair is None:
            client = httpx.AsyncClient(
                headers=self._headers, timeout=httpx.Timeout(self._timeout_s, connect=10.0), **self._pool()
            )
            pair = (client, asyncio.Semaphore(self._max_connections))
            with self._lock:
                self._clients = {each: kept for each, kept in self._clients.items() if not each.is_closed()}
                self._clients[loop] = pair
        return pair

    def _pool(self) -> dict[str, Any]:
        """A pool with one lane per connection; httpx's own pool if the environment names a proxy for the server."""
        tls = _tls(self._verify)
        proxied = urlsplit(self.base_url).hostname not in _LOOPBACK and getproxies()
        if not proxied:
            from bough.lang.backends.lanes import LaneTransport

            return {"transport": LaneTransport(tls, _KEEPALIVE_S)}
        import httpx

        most = self._max_connections
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=_KEEPALIVE_S)
        return {"verify": tls, "limits": limits}

    def _refused(self, status: int, body: str) -> BackendError:
        fixes = {
            401: "pass the right api_key=",
            403: "pass the right api_key=",
            404: "check the URL and the model's name",
        }
        return BackendError(
            what=f"{self.base_url} answered {status}",
            why=_message_of(body),
            fix=fixes.get(status, ""),
            http_status=status,
        )


def _tls(verify: bool | str) -> ssl.SSLContext:
    import httpx

    if isinstance(verify, str):
        return ssl.create_default_context(cafile=verify)
    return httpx.create_ssl_context(verify=verify)


def retry_delay_s(retry_after: str | None, attempt: int) -> float:
    """Seconds to wait before retrying on a busy server: its `Retry-After`, otherwise exponential backoff."""
    try:
        return min(float(retry_after or ""), 30.0)
    except ValueError:
        return 0.5 * 2.0**attempt


def _message_of(body: str) -> str:
    """The human part of an error body, in whichever of the usual shapes it comes."""
    try:
        decoded = json.loads(body)
    except ValueError:
        return body.strip()[:500]
    for key in ("error", "message", "detail"):
        if isinstance(decoded, dict) and decoded.get(key):
            inner = decoded[key]
            if isinstance(inner, dict):
                return str(inner.get("message", inner))
            return str(inner)
    return body.strip()[:500]
