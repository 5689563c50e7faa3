"""Who may call what: the same keys as over HTTP, before any method is looked up."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from bough.config.concerns import ServerConfig
from bough.core.errors import Unauthorized
from bough.entrypoints.grpc.errors import refuse

OPEN_SERVICE = "/grpc.health.v1.Health/"
"""Probes work without a key."""
ADMIN_METHODS = frozenset(
    f"/bough.v1.Bough/{name}" for name in ("PauseGeneration", "ContinueGeneration", "StartProfile", "StopProfile")
)

Metadata = Sequence[tuple[str, str | bytes]] | None


def authorization_of(metadata: Metadata) -> str:
    """What the caller sent to prove itself, or an empty text."""
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the key. Without `--admin-api-key` nobody may call admin methods."""

    def __init__(self, server: ServerConfig) -> None:
        self._key = server.api_key
        self._admin_key = server.admin_api_key

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        error = self.check(details.method, authorization_of(details.invocation_metadata))
        if error is None:
            return await continuation(details)

        async def deny(requests: object, context: Any) -> None:
            await refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(deny)

    def check(self, method: str, authorization: str) -> Unauthorized | None:
        """The error that this call deserves, if any."""
        if method.startswith(OPEN_SERVICE):
            return None
        if method in ADMIN_METHODS:
            keys = [self._admin_key] if self._admin_key else []
        elif self._key:
            keys = [key for key in (self._key, self._admin_key) if key]
        else:
            return None
        scheme, _, sent = authorization.partition(" ")
        matches = [hmac.compare_digest(sent.strip().encode(), key.encode()) for key in keys]
        if scheme.lower() == "bearer" and any(matches):
            return None
        what = "admin key" if method in ADMIN_METHODS else "key"
        return Unauthorized(
            what=f"the {what} is missing" if not authorization else f"the {what} is wrong",
            why="this method is protected" if keys else "the server was started without --admin-api-key",
            fix="send the metadata `authorization: Bearer KEY`",
        )


def tenant_of(metadata: Metadata, server: ServerConfig) -> str:
    """Cache namespace of the caller under --isolate-cache: the same as over HTTP."""
    sent = authorization_of(metadata)
    return hashlib.sha256(sent.encode()).hexdigest()[:16] if server.isolate_cache and sent else ""


def is_admin(metadata: Metadata, server: ServerConfig) -> bool:
    """Whether the caller may act on other people's requests."""
    if not server.api_key and not server.admin_api_key:
        return True
    sent = authorization_of(metadata).partition(" ")[2].strip()
    return bool(server.admin_api_key) and hmac.compare_digest(sent.encode(), server.admin_api_key.encode())
