"""`--root-path`: removes the path prefix of a reverse proxy from requests."""

from __future__ import annotations

from starlette.responses import RedirectResponse

from bough.entrypoints.http.security import App, Receive, Scope, Send


class RootPath:
    """ASGI middleware, the outermost. Requests that have no such prefix, because the proxy removed it, pass as they are."""

    def __init__(self, app: App, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == self._prefix:
                await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
                return
            if path.startswith(self._prefix + "/"):
                scope["path"] = path.removeprefix(self._prefix)
                scope["raw_path"] = scope.get("raw_path", b"").removeprefix(self._prefix.encode())
        await self._app(scope, receive, send)
