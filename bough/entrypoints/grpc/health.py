"""Standard health checking (grpc.health.v1), by the engine's heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bough.entrypoints.service import Service

_LOOK_EVERY_S = 0.5
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers for the server as a whole (the empty name) and for each service by name."""

    def __init__(self, service: Service, names: frozenset[str]) -> None:
        self._service = service
        self._names = names | {""}

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=self._status())

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent = None
        while True:
            status = self._status() if request.service in self._names else _UNKNOWN
            if status != sent:
                yield health_pb2.HealthCheckResponse(status=status)
                sent = status
            await asyncio.sleep(_LOOK_EVERY_S)

    def _status(self) -> Any:
        return _SERVING if self._service.health().ready else _NOT_SERVING
