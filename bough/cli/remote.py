"""A running server for commands: its address, its key, and its errors as `BoughError`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from bough.config.command_line import add_server_arguments
from bough.core.errors import BoughError, Forbidden, InvalidRequest, Unauthorized, Unavailable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that talks to a server's admin side."""
    add_server_arguments(parser, key="BOUGH_ADMIN_API_KEY or BOUGH_API_KEY")


def server_url(given: str) -> str:
    """The server's address, which may be given without its scheme, or with the /v1 of its API."""
    url = given.strip().rstrip("/")
    url = url if "://" in url else f"http://{url}"
    return url.removesuffix("/v1")


class Remote:
    """A client for JSON over HTTP."""

    def __init__(self, url: str, key: str = "", *, timeout_s: float = 30.0) -> None:
        import httpx

        self.key = key or os.environ.get("BOUGH_ADMIN_API_KEY", "") or os.environ.get("BOUGH_API_KEY", "")
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        self.url = server_url(url)
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s)

    def get(self, path: str, **query: str) -> dict[str, Any]:
        return self._ask("GET", path, params=query)

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        return self._ask("POST", path, json=fields)

    def _ask(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        """The answer's JSON. Raises what went wrong as a `BoughError`."""
        import httpx

        try:
            answer = self._client.request(method, path, **how)
        except httpx.HTTPError as error:
            raise Unavailable(
                what=f"no server answers at {self.url}",
                why=str(error) or type(error).__name__,
                fix="start one with `bough serve`, or name it with --url",
            ) from error
        try:
            found: dict[str, Any] = answer.json()
        except ValueError as error:
            raise InvalidRequest(
                what=f"{path} did not answer in JSON",
                why="this is not a bough server, or an old one",
                fix="check --url",
            ) from error
        if answer.status_code < 400:
            return found
        message = found.get("error", {}).get("message", "") if isinstance(found.get("error"), dict) else ""
        what, _, rest = message.partition("; ")
        kind = {401: Unauthorized, 403: Forbidden, 503: Unavailable}.get(answer.status_code, BoughError)
        fix = "send a key with --api-key" if answer.status_code in (401, 403) else ""
        raise kind(what=what or f"{path} answered {answer.status_code}", why=rest, fix=fix)
