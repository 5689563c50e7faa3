"""Direct dispatch: a path without parameters goes directly to its handler. The framework's dispatch (middleware,
router, exit stacks) costs more than parsing a request. It still serves everything else: paths with parameters, wrong
methods, unknown paths, the OpenAPI document, cross-origin requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from bough.entrypoints.http.errors import on_error
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.security import App, Receive, Scope, Send


class Direct:
    """ASGI application around the framework's."""

    def __init__(self, app: App, handlers: Mapping[tuple[str, str], Handler]) -> None:
        """`handlers` by method and path."""
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await handler(request)
            await response(scope, receive, send)
        except Exception as error:
            await (await on_error(request, error))(scope, receive, send)
