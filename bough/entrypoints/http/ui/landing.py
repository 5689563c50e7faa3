"""Redirects browsers from `/` to the playground. Other clients are not affected."""

from __future__ import annotations

from starlette.responses import RedirectResponse

from bough.entrypoints.http.security import App, Receive, Scope, Send
from bough.entrypoints.http.ui.routes import security_headers


class Landing:
    """ASGI middleware before the one that checks keys: a browser can't send a key before it has the page."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD") and _browses(scope):
            await RedirectResponse("ui/", headers=security_headers())(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _browses(scope: Scope) -> bool:
    """Whether the client asks for HTML explicitly, as browsers do; other programs accept anything or JSON."""
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
