"""JSON routes over gRPC: passes a body to the route's handler and returns its answer or events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from bough.core.errors import NotFound
from bough.entrypoints.grpc import bough_pb2 as pb
from bough.entrypoints.grpc.guard import caller_of
from bough.entrypoints.http.inside import answers, json_routes
from bough.entrypoints.service import Service


class Passing:
    """The JSON routes of a service."""

    def __init__(self, service: Service) -> None:
        self._routes = json_routes(service)
        self._keyring = service.keyring

    async def call(self, message: pb.CallRequest, context: Any) -> AsyncGenerator[pb.CallResponse, None]:
        """The route's answer, or each of its events. Raises what the route raises."""
        handler = self._routes.get(message.path)
        if handler is None:
            raise NotFound(
                what=f"there is no JSON route {message.path[:80]!r}",
                why=f"there are {', '.join(sorted(self._routes))}",
                fix="send one of these paths",
                param="path",
            )
        metadata, remaining = context.invocation_metadata(), context.time_remaining()
        headers = []
        if remaining is not None:
            headers.append((b"x-deadline-ms", f"{max(1.0, min(remaining, 86_400.0) * 1e3):.0f}".encode()))
        caller = caller_of(metadata, self._keyring)
        work = answers(handler, message.path, message.json.encode(), headers=headers, caller=caller)
        async with contextlib.aclosing(work) as replies:
            async for each in replies:
                yield pb.CallResponse(json=each)
