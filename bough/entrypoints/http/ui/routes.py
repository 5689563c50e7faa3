"""GET /ui, its files, GET /docs, and GET /ui/state: the tree and the batch, in numbers.

The files hold no secrets and need no key, since a browser can't send one before it has the page; everything the page then
asks for does. All its addresses are relative, so it works behind a path prefix.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bough.core.errors import NotFound
from bough.core.messages import Look
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.replies import caller_of, json_reply
from bough.entrypoints.http.security import UI_STATE
from bough.entrypoints.service import Service
from bough.tokenizer import Tokenizer

STATE_PATH = UI_STATE

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_FRESH_S = 0.2
"""Seconds for which a state is reused: the engine computes at most five per second, regardless of the number of
viewers."""
_SPAN_TOKENS = 48
"""Tokens of a span whose text the page shows: a few lines."""
_ORIGIN = re.compile(r"https?://[a-z0-9.\-]{1,253}(:[0-9]{1,5})?|https?://\[[0-9a-f:.]{2,45}\](:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class File:
    """One file of the page."""

    content: bytes
    media_type: str
    tag: str


@cache
def files() -> dict[str, File]:
    """The page's files by name, read once."""
    found = {}
    for path in sorted(_FOLDER.rglob("*")):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[path.relative_to(_FOLDER).as_posix()] = File(content, _TYPES[path.suffix], tag)
    return found


def security_headers(other_api: str = "") -> dict[str, str]:
    """The content security policy: the page may run and load its own files, and call this server and, if it was opened
    for one, one other."""
    connect = "'self'" if not other_api else f"'self' {other_api}"
    return {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data: blob:; "
            f"connect-src {connect}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }


def origin_of(url: str) -> str:
    """scheme://host[:port] of an API's address; empty if the address is invalid."""
    try:
        parts = urlsplit(url.strip())
        origin = f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return ""
    return origin if _ORIGIN.fullmatch(origin) else ""


def page(service: Service) -> Handler:
    """GET /ui, /ui/, /ui/{file}. `?api=URL` lets the page talk to another OpenAI-compatible server."""

    async def handle(request: Request) -> Response:
        if not request.url.path.startswith("/ui/"):
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"ui/{query}", headers=security_headers())
        name = request.path_params.get("file", "index.html")
        file = files().get(name)
        if file is None:
            raise NotFound(what=f"the playground has no {name[:60]!r}", why="no file has this name", fix="open /ui")
        headers = {**security_headers(origin_of(request.query_params.get("api", ""))), "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    return handle


def reference(service: Service) -> Handler:
    """GET /docs: the reference is one of the page's files."""

    async def handle(request: Request) -> Response:
        return RedirectResponse("ui/reference.html", headers=security_headers())

    return handle


def state(service: Service) -> Handler:
    """GET /ui/state: the engine's numbers, the spans of the tree, and the requests that are in it.

    Prompts may belong to other clients: without the admin key, only sizes of spans are returned, no text, unless the
    server has no keys at all.
    """
    drawn: tuple[float, dict[str, Any]] = (0.0, {})
    tokenizer = service.served.tokenizer
    drawing = asyncio.Lock()

    async def handle(request: Request) -> Response:
        nonlocal drawn
        async with drawing:
            if time.monotonic() - drawn[0] > _FRESH_S:
                seen = await service.engine_client.call(lambda call: Look(call, span_tokens=_SPAN_TOKENS))
                spans = [_with_text(span, tokenizer) for span in seen.get("spans", [])]
                drawn = (time.monotonic(), {**seen, "spans": spans})
        picture = drawn[1]
        if not caller_of(request).admin:
            spans = [{**span, "text": None} for span in picture.get("spans", [])]
            picture = {**picture, "rows": [_without_name(row) for row in picture.get("rows", [])], "spans": spans}
        return json_reply(picture, headers={"cache-control": "no-store"})

    return handle


def _with_text(span: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The span with the text of its first tokens instead of their ids; None without a tokenizer."""
    fields = {name: value for name, value in span.items() if name != "first_ids"}
    if tokenizer is None:
        return {**fields, "text": None}
    ids = [
        each for each in span.get("first_ids", []) if 0 <= each < tokenizer.vocab_size
    ]  # media have ids of their own
    return {**fields, "text": tokenizer.decode(ids, skip_special_tokens=False)}


def _without_name(row: dict[str, Any]) -> dict[str, Any]:
    """A client that knows a request's id can end it: others see the beginning only."""
    rid = str(row["rid"])
    return {**row, "rid": rid[: min(8, len(rid) // 2)] + "…"}
