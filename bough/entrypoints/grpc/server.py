"""Serves bough.proto, health checking and reflection on a separate port."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from bough.core import bounds
from bough.core.errors import ConfigError
from bough.entrypoints.grpc import bough_pb2, bough_pb2_grpc
from bough.entrypoints.grpc.guard import GrpcGuard
from bough.entrypoints.grpc.health import HealthServicer
from bough.entrypoints.grpc.servicer import BoughServicer
from bough.entrypoints.service import Service

_BOUGH = bough_pb2.DESCRIPTOR.services_by_name["Bough"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_MOST_STREAMS = 1024
"""Maximum number of concurrent calls per connection."""
_LATE_S = 2.0


class GrpcServer:
    """A gRPC server in the running event loop."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        """`port` 0: the system chooses one. Raises `ConfigError` if the address can't be had."""
        server = service.config.server
        self._drain_s = server.drain_timeout_s
        self._server = grpc.aio.server(
            interceptors=(GrpcGuard(service.keyring),),
            options=(
                ("grpc.max_receive_message_length", server.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", bounds.BOUNDS["header_bytes"].most),
                ("grpc.absolute_max_metadata_size", bounds.BOUNDS["header_bytes"].most),
                ("grpc.max_concurrent_streams", _MOST_STREAMS),
                ("grpc.so_reuseport", 0),
            ),
        )
        bough_pb2_grpc.add_BoughServicer_to_server(BoughServicer(service), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(service, frozenset({_BOUGH})), self._server)
        reflection.enable_server_reflection((_BOUGH, _HEALTH, reflection.SERVICE_NAME), self._server)
        name = f"[{host.strip('[]')}]" if ":" in host else host
        try:
            self.port: int = self._server.add_insecure_port(f"{name}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                what=f"can't listen for gRPC on {host}:{port}",
                why="another program has the port, or the address is not this machine's",
                fix="choose another --grpc-port",
                param="grpc_port",
            ) from error

    async def start(self) -> None:
        await self._server.start()

    async def drain(self, now: bool) -> None:
        """Accepts no new calls and returns when those in progress have ended. With `now` they are cancelled; otherwise
        they get a little more than the drain timeout, so that the engine ends them first."""
        await self._server.stop(0 if now else self._drain_s + _LATE_S)

    async def close(self) -> None:
        """Ends at once."""
        await self._server.stop(0)
