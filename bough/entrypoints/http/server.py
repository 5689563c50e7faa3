"""Runs the application in uvicorn: probes always work, other routes from the time the engine is ready until the server
drains."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator

import uvicorn

from bough.core.errors import Unavailable
from bough.entrypoints.http.errors import error_response
from bough.entrypoints.http.protocol import bounded
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.http.security import OPEN_PATHS, App, Receive, Scope, Send

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_CLOSING_S = 1
"""Seconds for clients to read the last bytes of their answers after the port is closed."""
_LOADING_S = 2
_REPLACED_S = 5
"""Seconds after which a client may try again: while the model loads, and when this server drains for another to come."""


class Front:
    """Wraps the application. Before it is open, and while it drains, probes are answered and everything else gets
    503."""

    def __init__(self) -> None:
        self._app: App | None = None
        self._draining = False
        self._running = 0
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    def open(self, app: App) -> None:
        """Passes requests to `app` from now on."""
        self._app = app

    def drain(self) -> None:
        """Passes only probes to the application from now on; running requests continue."""
        self._draining = True

    async def rest(self) -> None:
        """Returns when no request is running."""
        await self._at_rest.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            if scope["type"] == "http":
                await self._not_yet(scope, receive, send)
        elif self._draining and scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            await self._no_more(scope, receive, send)
        else:
            await self._count(self._app, scope, receive, send)

    async def _count(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self._running += 1
        self._at_rest.clear()
        try:
            await app(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._at_rest.set()

    async def _not_yet(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/livez":
            reply = json_reply({"status": "ok", "why": "the engine is starting"})
        else:
            starting = Unavailable(what="the engine is starting", why="it loads the model", fix="try again soon")
            starting.retry_after_s = _LOADING_S
            reply = error_response(starting, path=scope["path"])
        await reply(scope, receive, send)

    async def _no_more(self, scope: Scope, receive: Receive, send: Send) -> None:
        draining = Unavailable(
            what="the server is shutting down",
            why="it finishes the requests that it has, and takes no new ones",
            fix="send the request to another replica, or again in a moment",
        )
        draining.retry_after_s = _REPLACED_S
        await error_response(draining, {"connection": "close"}, path=scope["path"])(scope, receive, send)


class HttpServer:
    """Serves on bound sockets, within the running event loop."""

    def __init__(
        self,
        app: App,
        sockets: list[socket.socket],
        *,
        client_timeout_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
        uds: str | None = None,
    ) -> None:
        """`uds`: a Unix socket to serve on, instead of sockets that are bound already."""
        config = uvicorn.Config(
            app,
            uds=uds,
            http=bounded(client_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSING_S,
        )
        config.load()
        config.ssl = tls
        self._server = _Uvicorn(config)
        self._sockets = sockets

    async def run(self) -> None:
        """Serves until `stop`."""
        await self._server.serve(self._sockets or None)

    def stop(self, *, now: bool = False) -> None:
        """Closes the port and the connections; answers under way get a moment to leave, or with `now` nothing.

        If `Front.drain` or `Front.rest` has drained before, none is under way.
        """
        self._server.should_exit = True
        if now:
            self._server.force_exit = True

    async def started(self) -> None:
        """Returns once connections are accepted."""
        while not self._server.started:
            await asyncio.sleep(0.005)


class _Uvicorn(uvicorn.Server):
    """Signals are the launcher's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
