"""Authentication: the same keys as over HTTP, checked before any method is looked up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from bough.core.errors import BoughError, Unauthorized
from bough.engine_client.caller import Caller
from bough.entrypoints.grpc.errors import refuse
from bough.entrypoints.keyring import Keyring

OPEN_SERVICE = "/grpc.health.v1.Health/"
"""Probes work without a key."""
ADMIN_METHODS = frozenset(
    f"/bough.v1.Bough/{name}" for name in ("PauseGeneration", "ContinueGeneration", "StartProfile", "StopProfile")
)

_HOW_TO_SEND = "send the metadata `authorization: Bearer KEY`"

Metadata = Sequence[tuple[str, str | bytes]] | None


def authorization_of(metadata: Metadata) -> str:
    """The credentials that the caller sent, or an empty string."""
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a key. Without `--admin-api-key` admin methods are refused to all."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        error = self.check(details.method, details.invocation_metadata)
        if error is None:
            return await continuation(details)

        async def deny(requests: object, context: Any) -> None:
            await refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(deny)

    def check(self, method: str, metadata: Metadata) -> BoughError | None:
        """The error for this call, if it is not allowed. Counts the call for its caller's rate limit."""
        if method.startswith(OPEN_SERVICE):
            return None
        admin = method in ADMIN_METHODS
        if admin and not self._keyring.has_admin:
            return Unauthorized(
                what="the admin key is wrong" if authorization_of(metadata) else "the admin key is missing",
                why="the server was started without --admin-api-key",
                fix=_HOW_TO_SEND,
            )
        try:
            self._keyring.count(caller_of(metadata, self._keyring, admin=admin))
        except BoughError as error:
            return error
        return None


def caller_of(metadata: Metadata, keyring: Keyring, *, admin: bool = False) -> Caller:
    """The caller, identified as over HTTP. Raises `Unauthorized`."""
    return keyring.admit(authorization_of(metadata).encode("latin-1", "replace"), admin=admin, fix=_HOW_TO_SEND)
