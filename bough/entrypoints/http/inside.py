"""Calls routes from inside the process as if over HTTP, for servers of other protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping, Sequence
from typing import Any

from starlette.requests import Request

from bough.core.errors import InvalidRequest
from bough.engine_client.caller import ANYBODY, Caller
from bough.engine_client.names import random_name
from bough.entrypoints.http.app import mounted
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.replies import CALLER
from bough.entrypoints.service import Service

Message = MutableMapping[str, Any]
Headers = Sequence[tuple[bytes, bytes]]
_WAITING = 64
"""Maximum number of pieces of an answer that wait to be read; then the route waits."""


def json_routes(service: Service) -> dict[str, Handler]:
    """The routes that take a JSON body, by path; admin routes left out."""
    specs = [spec for spec in mounted(service) if spec.body is not None and not spec.admin and "POST" in spec.methods]
    return {path: spec.make(service) for spec in specs for path in spec.paths if "{" not in path}


async def answers(
    handler: Handler, path: str, body: bytes, *, headers: Headers = (), caller: Caller = ANYBODY
) -> AsyncGenerator[str, None]:
    """The JSON of the route's answer, or of each of its events. Raises what the route raises; closing it early acts
    like a client that disconnects."""
    scope: Message = {
        "type": "http", "method": "POST", "path": path, "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
        "bough.request_id": random_name(), CALLER: caller,
    }  # fmt: skip
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
    running = asyncio.ensure_future(_run(handler, scope, body, pieces))
    try:
        rest = b""
        streams = False
        while (piece := await pieces.get()) is not None:
            rest += piece
            streams = streams or rest.startswith((b"data:", b"event:", b":"))
            *whole, rest = rest.split(b"\n\n") if streams else [rest]
            for payload in map(_data, whole):
                if payload:
                    yield payload
        await running
        if rest:
            yield rest.decode()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _run(handler: Handler, scope: Message, body: bytes, pieces: asyncio.Queue[bytes | None]) -> None:
    """Puts what the route sends; None at the end, unless it is cancelled: then it is not read any more."""
    bodies = iter((body,))

    async def receive() -> Message:
        for raw in bodies:
            return {"type": "http.request", "body": raw, "more_body": False}
        await asyncio.Event().wait()  # a client that goes away cancels the call
        raise AssertionError("nothing sets the event")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            await pieces.put(bytes(message["body"]))

    try:
        response = await handler(Request(scope, receive))
        if response.media_type == "application/x-ndjson":
            raise InvalidRequest(
                what="this route streams lines", why="events are passed on", fix='send "stream": false', param="stream"
            )
        await response(scope, receive, send)
    except Exception:
        await pieces.put(None)
        raise
    await pieces.put(None)


def _data(event: bytes) -> str:
    """The JSON of an event; nothing for comments and for the mark of the end."""
    lines = [line.removeprefix(b"data:").strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    payload = b"\n".join(lines).decode()
    return "" if payload == "[DONE]" else payload
