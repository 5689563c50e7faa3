"""Authentication and authorisation: keys, admin keys, hosts and origins. One middleware, before every route.

Deny by default: every path needs a key except the probes. Without keys the server is meant for this machine only,
so requests that a browser was tricked into (foreign Host or Origin) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from bough.config.check import has_keys, is_loopback
from bough.config.concerns import ServerConfig
from bough.core.errors import BoughError, Forbidden, NotFound
from bough.engine_client.names import random_name
from bough.entrypoints.http.body import HOLD, Bodies
from bough.entrypoints.http.errors import ANTHROPIC_PREFIX, error_response
from bough.entrypoints.http.replies import CALLER
from bough.entrypoints.keyring import Keyring

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/health_generate", "/ready", "/ping"})
"""Probes: they read the heartbeat, disclose nothing else, and must work without a key."""

METRICS_PATH = "/metrics"
UI_PREFIX = "/ui"
_HOW_TO_SEND = "send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
_READING = frozenset({"GET", "HEAD"})
UI_STATE = "/ui/state"


_SLASHES = re.compile("//+")


class HttpGuard:
    """ASGI middleware. Gives every request an id (`x-request-id`), checks it, and passes it on."""

    def __init__(
        self,
        app: App,
        server: ServerConfig,
        keyring: Keyring,
        bodies: Bodies,
        admin_paths: frozenset[str] = frozenset(),
        responded: Callable[[str, int], None] | None = None,
        *,
        changing_gets: frozenset[str] = frozenset(),
    ) -> None:
        """`responded` is called with the path and the status of every response, except those of probes.
        `changing_gets`: paths of which a GET changes something."""
        self._app = app
        self._changing_gets = changing_gets
        self._keyring = keyring
        self._bodies = bodies
        self._responded = responded
        self._admin_paths = admin_paths
        self._origins = frozenset(server.cors_origins)
        self._has_keys = has_keys(server)
        self._local_only = is_loopback(server.host) and not self._has_keys and not server.insecure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "//" in scope["path"]:
            scope["path"] = _SLASHES.sub("/", scope["path"])  # base URLs that end with a slash make such paths
        request_id = random_name()
        scope["bough.request_id"] = request_id
        ids = [(b"x-request-id", request_id.encode())]
        if scope["path"].startswith(ANTHROPIC_PREFIX):
            ids.append((b"request-id", request_id.encode()))  # the name that Anthropic's clients read

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *ids]
                if self._responded is not None and scope["path"] not in OPEN_PATHS:
                    self._responded(scope["path"], message["status"])
            await send(message)

        try:
            self.check(scope)
        except BoughError as error:
            await error_response(error, path=scope["path"])(scope, receive, send_with_id)
            return
        hold = scope[HOLD] = self._bodies.hold()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            hold.end()

    def check(self, scope: Scope) -> None:
        """Raises the error for a request that is not allowed, before its route is looked up."""
        authorization = b""
        host = b""
        origin = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"x-api-key" and not authorization:
                authorization = b"Bearer " + value  # as Anthropic's clients send it
            elif name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        path = scope["path"]
        if scope["method"] == "OPTIONS":
            self._check_origin(host.decode("latin-1"), origin.decode("latin-1"))
            return
        if path in OPEN_PATHS:
            return
        if self._local_only:
            self._check_local(host.decode("latin-1"), origin.decode("latin-1"))
        if path in self._changing_gets and scope["method"] in _READING:
            _refuse_browsers(scope["headers"], origin)
        if path in self._admin_paths and not self._keyring.has_admin:
            raise NotFound(
                what=f"there is no {path}",
                why="the server was started without --admin-api-key (or --admin-with-api-key), and so without admin routes",
                fix="start it with one",
            )
        if not is_page(path):
            caller = self._keyring.admit(
                authorization, admin=path in self._admin_paths, metrics=path == METRICS_PATH, fix=_HOW_TO_SEND
            )
            if scope["method"] not in _READING:
                self._keyring.count(caller)
            scope[CALLER] = caller

    def _check_local(self, host: str, origin: str) -> None:
        if host and not _is_ours(host):
            raise Forbidden(
                what=f"this server does not answer to the name {_host_name(host)[:100]!r}",
                why="without a key it serves this machine only, under its loopback names",
                fix="call http://127.0.0.1, or start the server with --api-key (or --insecure)",
            )
        self._check_origin(host, origin)

    def _check_origin(self, host: str, origin: str) -> None:
        """Checks the origin of calls without a key and of preflight requests."""
        if origin and not self._origins & {origin, "*"} and origin.partition("://")[2] != host:
            raise Forbidden(
                what="pages of another origin may not call this server",
                why="it trusts its own pages only" if self._has_keys else "without a key it trusts its own pages only",
                fix="start the server with --cors-origins and the page's origin",
            )


def _refuse_browsers(headers: Sequence[tuple[bytes, bytes]], origin: bytes) -> None:
    """Raises `Forbidden` for a GET that a foreign page made a browser send. Only pages of this server may send it,
    which have an Origin header; links, images and typed addresses have none."""
    sent = dict(headers)
    site = sent.get(b"sec-fetch-site", b"")
    is_browser = bool(site) or b"sec-fetch-mode" in sent or sent.get(b"user-agent", b"").startswith(b"Mozilla/")
    if site in (b"cross-site", b"same-site") or (is_browser and not origin):
        raise Forbidden(
            what="this GET changes something, and a browser sent it",
            why="any page can have a browser send a GET",
            fix="send a POST",
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
