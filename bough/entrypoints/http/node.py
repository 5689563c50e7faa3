"""The HTTP server of a machine that runs ranks and accepts no requests: probes, and an error that points to machine
0."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from bough.config.concerns import Config
from bough.core.errors import BoughError, NotFound
from bough.entrypoints.http.errors import error_response
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.http.security import OPEN_PATHS, Receive, Scope, Send
from bough.entrypoints.http.server import Front, HttpServer


class NodeDoor:
    """Serves one socket. Probes say "not ready" until the engine that this machine is part of takes requests."""

    def __init__(self, config: Config, sock: socket.socket) -> None:
        self._config = config
        self._front = Front()
        self._server = HttpServer(self._front, [sock])
        self._stopping = asyncio.Event()

    async def run(self, ready: Awaitable[Mapping[str, Any]], opened: Callable[[], None]) -> None:
        """Serves until `drain`; calls `opened` when the engine accepts requests. Raises the error that start-up failed
        with."""
        waiting = asyncio.ensure_future(ready)
        serving = asyncio.ensure_future(self._server.run())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((waiting, serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
                self._front.open(self._app)
                opened()
                await stopping
        finally:
            for future in (waiting, stopping):
                future.cancel()
            self._server.stop(now=True)
            await asyncio.gather(waiting, serving, stopping, return_exceptions=True)

    def drain(self, *, now: bool = False) -> None:
        """Ends `run`."""
        self._stopping.set()

    async def fail(self, error: BoughError) -> None:
        """The engine is gone."""
        self._stopping.set()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parallel = self._config.parallel
        if scope["path"] in OPEN_PATHS:
            why = f"machine {parallel.node_rank} of {parallel.nnodes}"
            reply = json_reply({"status": "ok", "why": why})
        else:
            host = parallel.dist_init_addr.rpartition(":")[0]
            elsewhere = NotFound(
                what=f"machine {parallel.node_rank} takes no requests",
                why="it runs ranks of an engine whose machine 0 does",
                fix=f"ask machine 0 ({host})",
            )
            reply = error_response(elsewhere)
        await reply(scope, receive, send)
