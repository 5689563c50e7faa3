"""Request bodies: read within size limits, parsed once, validated against a struct, with a list of unknown fields."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import UnionType
from typing import Any, Generic, Literal, TypeVar

import msgspec
from starlette.requests import Request

from bough.core import bounds
from bough.core.errors import BodyTooLarge, InvalidRequest
from bough.engine_client.unserved import refuse_unserved
from bough.entrypoints.http.errors import BodiesFull, BodyCutOff
from bough.entrypoints.http.large_json import LARGE_BYTES, graft, parse_large
from bough.entrypoints.stream import ClientGone
from bough.platform.memory_return import trim_memory

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

IGNORED_HEADER = "x-bough-ignored-fields"

PARSED = "bough.parsed"
"""Key of a request's scope that marks its body as a JSON object."""
HOLD = "bough.body"
"""Key of a request's scope for its `Hold`."""
SMALL_BYTES = 64 * 1024
"""Bodies up to this size are always accepted: their number is limited by that of connections."""
_TRIM_AFTER_S = 1.0
_MOST_NAMED = 16
_PATIENCE = 4
"""Factor of the limit up to which a body is read (and dropped) before the connection is closed."""
_decode = msgspec.json.Decoder().decode
_AT = re.compile(r" - at `\$(.*)`$")
_NOT_WHOLE = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$([^`]*)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_PACKINGS = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"})
"""Encodings that change a body. Some clients write the character set there ("utf-8"): theirs are plain."""
_MOST_REWRITTEN = 64
_MOST_REWRITTEN_IF_LARGE = 4
"""Maximum number of floats (or lists of them) of one body that are converted to integers."""


class CheckedBody(Generic[T]):
    """A checked body, and the names of its fields that are not read."""

    __slots__ = ("ignored", "value")

    def __init__(self, value: T, ignored: tuple[str, ...]) -> None:
        self.value = value
        self.ignored = ignored

    def headers(self, *others: str) -> dict[str, str]:
        """The warning header, if there are warnings: unknown fields, and `others` that were ignored."""
        ignored = (*self.ignored, *others)
        if not ignored:
            return {}
        names = [name if name.isascii() and name.isprintable() else "?" for name in ignored[:_MOST_NAMED]]
        return {IGNORED_HEADER: ",".join(name[:64].replace(",", "?") for name in names)}


class PackedBody(InvalidRequest):
    status = 415
    code = "unsupported_content_encoding"


def header(request: Request, name: bytes) -> str | None:
    """The first header of that name, which is given in small letters."""
    for each, value in request.scope["headers"]:
        if each == name:
            return str(value, "latin-1")
    return None


class Bodies:
    """The bodies that an API worker holds at one time: their total bytes, and which one is being parsed. Small bodies
    do not count, so that a chat is accepted while other clients send videos.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0
        self.parsing = asyncio.Lock()
        """Large bodies are parsed one after the other; several at once would block the event loop for too long."""
        self._trimming: asyncio.TimerHandle | None = None

    def hold(self) -> Hold:
        return Hold(self)

    def trim_soon(self) -> None:
        """Returns the memory of a large body to the system, a moment after it was released."""
        if self._trimming is not None:
            self._trimming.cancel()
        self._trimming = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        # The error of a refused body and its traceback refer to each other, and to the body. Everything that was there at
        # start-up is frozen, so that this takes milliseconds.
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


class Hold:
    """One body's share of the bytes in flight."""

    __slots__ = ("_bodies", "_counted", "_size")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0
        self._counted = 0

    @property
    def parsing(self) -> asyncio.Lock:
        return self._bodies.parsing

    def add(self, num_bytes: int) -> None:
        """Counts further bytes. Raises `BodiesFull` if all bodies together exceed the limit."""
        self._size += num_bytes
        if self._size <= SMALL_BYTES:
            return
        more = self._size - self._counted
        if self._bodies.num_bytes + more > self._bodies.most:
            raise BodiesFull(
                what="too much is being sent at the same time",
                why=f"{self._bodies.num_bytes} bytes of requests are being received, at most {self._bodies.most} may be",
                fix="try again in a moment; --max-body-bytes-in-flight allows for more",
            )
        self._counted = self._size
        self._bodies.num_bytes += more

    def parsed(self) -> None:
        """The body was parsed, and its bytes were released."""
        self._bodies.num_bytes -= self._counted
        self._counted = 0

    def end(self) -> None:
        """The request is over."""
        self.parsed()
        if self._size > LARGE_BYTES:
            self._bodies.trim_soon()


async def _read_bytes(request: Request, most: int) -> bytes:
    """The whole body, at most `most` bytes.

    A body that is a little too large is read to its end and dropped, so that its client can read the refusal; with one
    that is far too large the connection is closed. Either way no more than `most` bytes are kept.
    """
    packed = header(request, b"content-encoding")
    if packed and not _PACKINGS.isdisjoint(re.split(r"[\s,]+", packed.lower())):
        raise PackedBody(
            what=f"the body's content-encoding is {packed[:40]!r}",
            why="compressed bodies are not unpacked here",
            fix="send it plain, without content-encoding",
        )
    announced = header(request, b"content-length")
    if announced and announced.isdecimal() and int(announced) > most * _PATIENCE:
        raise too_large(most, close=True)
    hold: Hold | None = request.scope.get(HOLD)
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size <= most:
            if hold is not None:
                hold.add(len(chunk))
            chunks.append(chunk)
        else:
            chunks.clear()
        if size > most * _PATIENCE:
            raise too_large(most, close=True)
    if size > most:
        raise too_large(most, close=False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _take_apart(request: Request, raw: bytes) -> tuple[bytes, list[str | list[int]]]:
    """A large body without its long strings and lists, and these. Yields to other tasks in between."""
    hold: Hold | None = request.scope.get(HOLD)
    async with hold.parsing if hold is not None else contextlib.nullcontext():
        work = parse_large(raw)
        while True:
            try:
                next(work)
            except StopIteration as done:
                parts: tuple[bytes, list[str | list[int]]] = done.value
                return parts
            await asyncio.sleep(0)


def too_large(most: int, *, close: bool) -> BodyTooLarge:
    kind = BodyCutOff if close else BodyTooLarge
    return kind(
        what="the request body is too large",
        why=f"at most {most} bytes are read",
        fix="send less at once, or start the server with a larger --max-body-bytes",
    )


async def read_json(
    request: Request, kind: type[S], *, most: int, strict: bool, empty: S | None = None
) -> CheckedBody[S]:
    """The body as `kind`. With `strict`, unknown fields are an error. `empty`: the value if there is no body."""
    raw = await _read_bytes(request, most)
    if empty is not None and not raw.strip():
        return CheckedBody(empty, ())
    try:
        if len(raw) <= LARGE_BYTES:
            return as_kind(_noted(raw, request), kind, strict=strict)
        raw, cut = await _take_apart(request, raw)
        body = as_kind(_noted(raw, request), kind, strict=strict, most_rewritten=_MOST_REWRITTEN_IF_LARGE)
        return CheckedBody(graft(body.value, cut), body.ignored)
    finally:
        _let_go(request)


async def read_object(request: Request, most: int) -> dict[str, Any]:
    """The body as a JSON object of bounded depth. Raises `InvalidRequest`."""
    raw = await _read_bytes(request, most)
    try:
        if len(raw) <= LARGE_BYTES:
            return _noted(raw, request)
        raw, cut = await _take_apart(request, raw)
        data: dict[str, Any] = graft(_noted(raw, request), cut)
        return data
    finally:
        _let_go(request)


def _noted(raw: bytes, request: Request) -> dict[str, Any]:
    data = parse_object(raw)
    request.scope[PARSED] = True
    return data


def _let_go(request: Request) -> None:
    hold: Hold | None = request.scope.get(HOLD)
    if hold is not None:
        hold.parsed()


def as_kind(
    data: dict[str, Any], kind: type[S], *, strict: bool, most_rewritten: int = _MOST_REWRITTEN
) -> CheckedBody[S]:
    """An object as `kind`. Raises `InvalidRequest` with the path and the reason if it is invalid."""
    value = _convert(data, kind, most_rewritten)
    return CheckedBody(value, unknown_fields(data, known_fields(kind), strict=strict))


def unknown_fields(data: Mapping[str, Any], known: Collection[str], *, strict: bool) -> tuple[str, ...]:
    """Fields that will be ignored. Raises `InvalidRequest` for what must not be, and under `strict` for any."""
    ignored = tuple(name for name in data if name not in known)
    if ignored:
        ignored = refuse_unserved(data, ignored)
    if ignored and strict:
        raise InvalidRequest(
            what=f"unknown field {ignored[0][:60]!r}",
            why="the server runs with --strict-api",
            fix="remove it",
            param=ignored[0][:60],
        )
    return ignored


def _convert(data: dict[str, Any], kind: type[S], most_rewritten: int) -> S:
    """`data`, which may be modified, as `kind`. Floats with integral values (5.0) are accepted as integers, because
    some clients write all numbers as floats. Their number is limited, because each takes another validation of the
    whole body."""
    tries = 0
    while True:
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            if tries == most_rewritten or not _rewritten(data, str(error)):
                raise _invalid(error, kind) from error
            tries += 1


def _rewritten(data: Any, problem: str) -> bool:
    """Converts the value that the validation error is about to an integer, if it is integral (and the others of its
    list). Returns whether it did."""
    found = _NOT_WHOLE.match(problem)
    if found is None:
        return False
    steps: list[str | int] = [name or int(at) for name, at in _STEP.findall(found.group(1))]
    try:
        for step in steps[:-1]:
            data = data[step]
        value = data[steps[-1]]
    except (LookupError, TypeError):
        return False
    if not isinstance(value, float) or not value.is_integer():
        return False
    if isinstance(data, list):
        data[:] = [int(each) if isinstance(each, float) and each.is_integer() else each for each in data]
    else:
        data[steps[-1]] = int(value)
    return True


def parse_object(raw: bytes) -> dict[str, Any]:
    """Bytes as a JSON object of bounded depth. Raises `InvalidRequest`."""
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
    return data


@lru_cache(maxsize=64)
def known_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Names that a body of this kind may have."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def _invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> InvalidRequest:
    text = str(error)
    found = _AT.search(text)
    path = found.group(1).removeprefix(".") if found else ""
    problem = _AT.sub("", text).replace("`", "")
    missing = re.fullmatch(r"Object missing required field (\w+)", problem)
    if missing:
        field = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return InvalidRequest(what=f"{field} is missing", why="it is required", fix=f"send {field}", param=field)
    choices = _choices(kind, path) if problem.startswith("Invalid enum value") else []
    fix = f"send a valid {path}" if path else "send a valid body"
    return InvalidRequest(
        what=f"{path or 'the body'} has the wrong type or value",
        why=problem[:1].lower() + problem[1:],
        fix=f"send one of {', '.join(choices)}" if choices else fix,
        param=path or None,
    )


def _choices(kind: type[msgspec.Struct], path: str) -> list[str]:
    """The values that the field at this path of a body may have, where it is one of a few."""
    types: list[Any] = [kind]
    for name, _ in _STEP.findall(f".{path}"):
        hints = [typing.get_type_hints(each) for each in types if name and hasattr(each, "__struct_fields__")]
        types = _members([each[name] for each in hints if name in each]) if name else types
    return [str(choice) for each in types if typing.get_origin(each) is Literal for choice in typing.get_args(each)]


def _members(types: Sequence[Any]) -> list[Any]:
    """The members of unions and lists."""
    found: list[Any] = []
    for each in types:
        origin = typing.get_origin(each)
        inner = origin in (list, tuple, UnionType, typing.Union)
        found += _members(typing.get_args(each)) if inner else [each]
    return found


def _name_of(data: object) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names.get(type(data), "value")
