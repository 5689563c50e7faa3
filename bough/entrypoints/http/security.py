"""Who may call what: keys, admin keys, hosts and origins, and the size of headers. One middleware, before every route.

Deny by default: every path needs the key except the probes. Without a key the server is meant for this machine only,
so requests that a browser was tricked into (foreign Host or Origin) are refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from bough.config.check import is_loopback
from bough.config.concerns import ServerConfig
from bough.core import bounds
from bough.core.errors import BoughError, Forbidden, InvalidRequest, NotFound, Unauthorized
from bough.entrypoints.http.errors import error_response
from bough.intake.names import random_name

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/health_generate", "/ready", "/ping"})
"""Probes: they read the heartbeat, tell nothing else, and must work for whoever has no key."""

UI_PREFIX = "/ui"
UI_STATE = "/ui/state"


class HeadersTooLarge(InvalidRequest):
    status = 431
    code = "headers_too_large"


class Guard:
    """ASGI middleware. Gives every request an id (`x-request-id`), checks it, and passes it on."""

    def __init__(
        self,
        app: App,
        server: ServerConfig,
        admin_paths: frozenset[str] = frozenset(),
        responded: Callable[[str, int], None] | None = None,
    ) -> None:
        """`responded` hears the path and the status of every response, probes' left out."""
        self._app = app
        self._responded = responded
        self._key = server.api_key.encode()
        self._admin_key = server.admin_api_key.encode()
        self._admin_paths = admin_paths
        self._origins = frozenset(server.cors_origins)
        self._isolate_cache = server.isolate_cache
        self._local_only = is_loopback(server.host) and not server.api_key and not server.insecure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = random_name()
        scope["bough.request_id"] = request_id
        id_header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], id_header]
                if self._responded is not None and scope["path"] not in OPEN_PATHS:
                    self._responded(scope["path"], message["status"])
            await send(message)

        try:
            self.check(scope)
        except BoughError as error:
            await error_response(error, path=scope["path"])(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def check(self, scope: Scope) -> None:
        """Raises the error that this request deserves before its route is even looked up."""
        authorization = b""
        host = b""
        origin = b""
        size = 0
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            if name == b"authorization":
                authorization = value
            elif name == b"x-api-key" and not authorization:
                authorization = b"Bearer " + value  # as Anthropic's clients send it
            elif name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        if size > bounds.BOUNDS["header_bytes"].most:
            raise HeadersTooLarge(
                what=f"{size} bytes of headers",
                why=f"at most {bounds.BOUNDS['header_bytes'].most} are allowed",
                fix="send fewer or shorter headers",
            )
        path = scope["path"]
        if scope["method"] == "OPTIONS" or path in OPEN_PATHS:
            return
        if self._local_only:
            self._check_local(host.decode("latin-1"), origin.decode("latin-1"))
        is_admins = path in self._admin_paths
        if is_admins and self._admin_key:
            self._check_key(authorization, (self._admin_key,), "admin key")
        elif self._key and not is_page(path):
            self._check_key(authorization, (self._key, self._admin_key), "key")
        if is_admins and not self._admin_key:
            raise NotFound(
                what=f"there is no {path}",
                why="the server was started without --admin-api-key, and so without admin routes",
                fix="start it with one",
            )
        if self._isolate_cache and authorization:
            scope["bough.tenant"] = hashlib.sha256(authorization).hexdigest()[:16]

    def _check_key(self, authorization: bytes, keys: tuple[bytes, ...], what: str) -> None:
        scheme, _, sent = authorization.partition(b" ")
        matches = [hmac.compare_digest(sent.strip(), key) for key in keys if key]  # all of them: equal time for each
        if scheme.lower() == b"bearer" and any(matches):
            return
        raise Unauthorized(
            what=f"the {what} is missing" if not authorization else f"the {what} is wrong",
            why="this route is protected",
            fix="send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`",
        )

    def _check_local(self, host: str, origin: str) -> None:
        if host and not _is_ours(host):
            raise Forbidden(
                what=f"this server does not answer to the name {_host_name(host)[:100]!r}",
                why="without a key it serves this machine only, under its loopback names",
                fix="call http://127.0.0.1, or start the server with --api-key (or --insecure)",
            )
        if origin and origin not in self._origins and origin.partition("://")[2] != host:
            raise Forbidden(
                what="pages of another origin may not call this server",
                why="without a key it trusts its own pages only",
                fix="start the server with --cors-origins and the page's origin",
            )


def is_page(path: str) -> bool:
    """Whether the path is a static page or a file of one, which a browser must get before it can send a key."""
    return path in (UI_PREFIX, "/docs") or (path.startswith(UI_PREFIX + "/") and path != UI_STATE)


@lru_cache(maxsize=256)
def _is_ours(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    return is_loopback(_host_name(host))


def _host_name(host: str) -> str:
    """A Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_admin(scope: Scope, server: ServerConfig) -> bool:
    """Whether the caller may act on other people's requests: it has the admin key, or the server has no keys at all."""
    if not server.api_key and not server.admin_api_key:
        return True
    headers = dict(scope["headers"])
    sent = (
        headers[b"authorization"].partition(b" ")[2] if b"authorization" in headers else headers.get(b"x-api-key", b"")
    )
    key = server.admin_api_key.encode()
    return bool(key) and hmac.compare_digest(sent.strip(), key)
