"""GET /metrics: the whole server's numbers, whichever API worker is asked; also on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket

from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import NotFound
from bough.entrypoints.http.body import Bodies
from bough.entrypoints.http.errors import error_response
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.security import HttpGuard, Receive, Scope, Send
from bough.entrypoints.http.server import HttpServer
from bough.entrypoints.keyring import Keyring
from bough.entrypoints.service import Service
from bough.observability.metrics import CONTENT_TYPE, render


def metrics(service: Service) -> Handler:
    """Prometheus' text format. Reads shared memory only, so it works while the engine is stuck."""

    async def handle(request: Request) -> Response:
        readings = service.telemetry.readings(service.beat(), up=service.health().ready)
        return Response(render(readings, model=service.served.name), media_type=CONTENT_TYPE)

    return handle


async def open_metrics_port(service: Service, sock: socket.socket) -> None:
    """Serves /metrics without a key on the socket, until the service closes. Foreign hosts and origins are refused as on the
    server's own port where it has no key."""
    answer = metrics(service)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET" and scope["path"] == "/metrics":
            reply = await answer(Request(scope, receive))
        else:
            missing = NotFound(what="there is nothing but /metrics", why="this is --metrics-port", fix="GET /metrics")
            reply = error_response(missing)
        await reply(scope, receive, send)

    none = {"api_keys_file": "", "admin_api_key": "", "admin_with_api_key": False, "metrics_api_key": ""}
    unkeyed = dataclasses.replace(service.config.server, api_key=(), **none)  # type: ignore[arg-type]
    server = HttpServer(HttpGuard(app, unkeyed, Keyring(unkeyed), Bodies(unkeyed.max_body_bytes)), [sock])
    serving = asyncio.ensure_future(server.run())

    async def close() -> None:
        server.stop(now=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(serving, return_exceptions=True)

    service.at_close(close)
    await server.started()
