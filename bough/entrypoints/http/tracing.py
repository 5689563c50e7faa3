"""`X-Trace: 1` and OpenTelemetry: which requests are traced, and how a client gets its timeline.

A whole answer carries it in the header `x-trace` (and, summed up, in `server-timing`); a stream ends with one more event,
named `trace`, after the dialect's last one, so that no client that does not know it is disturbed.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import msgspec

from bough.entrypoints.http.security import OPEN_PATHS, App, Receive, Scope, Send
from bough.observability.trace import CURRENT, OtlpExporter, Trace, valid_parent

_encode = msgspec.json.Encoder().encode
_MOST_HEADER_BYTES = 8000
_ON = (b"1", b"true")
_UNTRACED = OPEN_PATHS | {"/metrics"}
"""Probes and metrics: frequent paths that are not traced."""


class Tracing:
    """ASGI middleware inside the guard: requests have an id and are allowed."""

    def __init__(self, app: App, exporter: OtlpExporter | None = None) -> None:
        self._app = app
        self._exporter = exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wants, parent = _asked(scope)
        if not wants and (self._exporter is None or scope["path"] in _UNTRACED):
            await self._app(scope, receive, send)
            return
        trace = Trace(f"{scope['method']} {scope['path']}", scope.get("bough.request_id", ""), parent)
        token = CURRENT.set(trace)
        try:
            await self._app(scope, receive, _Told(trace, send, wants).send)
        finally:
            CURRENT.reset(token)
            if self._exporter is not None and scope["path"] not in _UNTRACED:
                self._exporter.export(trace)


class _Told:
    """Adds the timeline to the response."""

    def __init__(self, trace: Trace, send: Send, wants: bool) -> None:
        self._trace = trace
        self._send = send
        self._wants = wants
        self._streams = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._trace.status = message["status"]
            kind = next((value for name, value in message["headers"] if name == b"content-type"), b"")
            self._streams = kind.startswith(b"text/event-stream")
            if self._wants and not self._streams:
                message["headers"] = [*message["headers"], *self._headers()]
        elif self._wants and self._streams and not message.get("more_body", False):
            event = b"event: trace\ndata: " + _encode(self._trace.as_json()) + b"\n\n"
            message = {**message, "body": bytes(message.get("body", b"")) + event}
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"server-timing", self._trace.server_timing().encode())]
        encoded = _encode(self._trace.as_json())
        if len(encoded) <= _MOST_HEADER_BYTES:
            headers.append((b"x-trace", encoded))
        return headers


def _asked(scope: Scope) -> tuple[bool, str]:
    """Whether the client wants a timeline, and the trace that its request is part of."""
    if scope["type"] != "http":
        return False, ""
    wants, parent = False, ""
    for name, value in scope["headers"]:
        if name == b"x-trace":
            wants = value.strip().lower() in _ON
        elif name == b"traceparent":
            parent = valid_parent(value.decode("latin-1"))
    return wants, parent
