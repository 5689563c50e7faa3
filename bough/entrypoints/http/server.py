"""uvicorn around the application: probes work from the first moment, the rest once the engine is ready."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from bough.core.errors import Unavailable
from bough.entrypoints.http.errors import error_response
from bough.entrypoints.http.protocol import bounded
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.http.security import App, Receive, Scope, Send

_BACKLOG = 2048
_KEEP_ALIVE_S = 75


class Front:
    """The application before there is one: alive, not ready, everything else answers 503."""

    def __init__(self) -> None:
        self._app: App | None = None

    def open(self, app: App) -> None:
        """From now on requests go to `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            if scope["path"] == "/livez":
                reply = json_reply({"status": "ok", "why": "the engine is starting"})
            else:
                starting = Unavailable(what="the engine is starting", why="it loads the model", fix="try again soon")
                reply = error_response(starting, {"retry-after": "2"})
            await reply(scope, receive, send)


class HttpServer:
    """Serves on bound sockets, within the running event loop."""

    def __init__(
        self, app: App, sockets: list[socket.socket], *, drain_timeout_s: float, client_timeout_s: float = 30.0
    ) -> None:
        config = uvicorn.Config(
            app,
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
            timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        )
        self._server = _Uvicorn(config)
        self._sockets = sockets

    async def run(self) -> None:
        """Serves until `stop`, then lets requests finish for the drain timeout."""
        await self._server.serve(self._sockets)

    def stop(self, *, now: bool = False) -> None:
        """Takes no new connections; `now` gives up running requests as well."""
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
