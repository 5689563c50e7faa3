"""Errors as gRPC statuses. As over HTTP, details of errors other than `BoughError` are not shown."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc

from bough.core.errors import BoughError, Overloaded
from bough.entrypoints.http.errors import in_words

_log = logging.getLogger(__name__)

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def shown(error: Exception) -> BoughError:
    """The error as one that may be shown; others are logged."""
    if isinstance(error, BoughError):
        return error
    _log.error("a call failed", exc_info=error)
    return BoughError(what="the server failed to answer this call", why="an internal error, which was logged")


async def refuse(context: Any, error: Exception, *, path: str = "") -> NoReturn:
    """Ends the call with the error's status. `path`: the JSON route that was called, whose field names are then
    used."""
    public = shown(error)
    message, param = in_words(public, path)
    trailing = [("bough-code", public.code or public.type)]
    if param:
        trailing.append(("bough-param", "".join(each for each in param if " " <= each <= "~")[:200]))
    if isinstance(public, Overloaded):
        trailing.append(("retry-after", str(public.retry_after_s)))
    context.set_trailing_metadata(tuple(trailing))
    await context.abort(_CODES.get(public.status, grpc.StatusCode.INTERNAL), message)
    raise AssertionError("abort raises")
