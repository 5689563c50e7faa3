"""Request bodies: read under a size limit, parsed once, checked against a struct, unknown fields noted."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from bough.core.errors import InvalidRequest
from bough.entrypoints import bounds
from bough.entrypoints.stream import ClientGone

T = TypeVar("T", bound=msgspec.Struct)

IGNORED_HEADER = "x-bough-ignored-fields"

_MOST_NAMED = 16
_decode = msgspec.json.Decoder().decode
_AT = re.compile(r" - at `\$(.*)`$")
_WORDS = (("`", ""), ("null", "null"), ("object", "an object"), ("array", "a list"))


class Body(Generic[T]):
    """A checked body, and the names of fields that it has but nobody reads."""

    __slots__ = ("ignored", "value")

    def __init__(self, value: T, ignored: tuple[str, ...]) -> None:
        self.value = value
        self.ignored = ignored

    def headers(self) -> dict[str, str]:
        """The warning header, if there is something to warn of."""
        if not self.ignored:
            return {}
        names = [name if name.isascii() and name.isprintable() else "?" for name in self.ignored[:_MOST_NAMED]]
        return {IGNORED_HEADER: ",".join(name[:64].replace(",", "?") for name in names)}


async def read_bytes(request: Request, most: int) -> bytes:
    """The whole body. Raises `BodyTooLarge` as soon as too much was announced or has arrived."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal():
        bounds.body_bytes(int(announced), most)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            bounds.body_bytes(size, most)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_json(request: Request, kind: type[T], *, most: int, strict: bool) -> Body[T]:
    """The body as `kind`. Under `strict` unknown fields are an error."""
    return parse_json(await read_bytes(request, most), kind, strict=strict)


def parse_json(raw: bytes, kind: type[T], *, strict: bool) -> Body[T]:
    """Bytes of JSON as `kind`. Raises `InvalidRequest` saying where and why they are not."""
    if not raw.strip():
        raise InvalidRequest(what="the body is empty", why="this route needs a JSON object", fix="send one")
    try:
        data = _decode(raw)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            what="the body is not UTF-8", why="JSON text must be", fix="encode strings as UTF-8"
        ) from error
    except RecursionError as error:
        raise InvalidRequest(
            what="the body is nested too deeply",
            why=f"at most {bounds.BOUNDS['json_depth'].most} levels are allowed",
            fix="flatten it",
        ) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(what="the body is not JSON", why=str(error), fix="send a valid JSON object") from error
    if raw.count(b"{") + raw.count(b"[") > bounds.BOUNDS["json_depth"].most:
        bounds.depth(data, "json_depth", None)
    if not isinstance(data, dict):
        raise InvalidRequest(
            what=f"the body is a JSON {_name_of(data)}", why="this route needs an object", fix="send an object"
        )
    try:
        value = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    ignored = tuple(name for name in data if name not in known_fields(kind))
    if ignored and strict:
        raise InvalidRequest(
            what=f"unknown field {ignored[0]!r}"[:200],
            why="the server runs with --strict-api",
            fix="remove it",
            param=ignored[0][:64],
        )
    return Body(value, ignored)


@lru_cache(maxsize=64)
def known_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Names that a body of this kind may have."""
    return frozenset(kind.__struct_encode_fields__)


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    text = str(error)
    found = _AT.search(text)
    path = found.group(1).removeprefix(".") if found else ""
    problem = _AT.sub("", text).replace("`", "")
    missing = re.fullmatch(r"Object missing required field (\w+)", problem)
    if missing:
        field = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return InvalidRequest(what=f"{field} is missing", why="it is required", fix=f"send {field}", param=field)
    return InvalidRequest(
        what=f"{path or 'the body'} has the wrong type or value",
        why=problem[:1].lower() + problem[1:],
        fix=f"send a valid {path}" if path else "send a valid body",
        param=path or None,
    )


def _name_of(data: object) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names.get(type(data), "value")
