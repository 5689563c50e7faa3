"""Turns failed ends of requests into errors."""

from __future__ import annotations

from bough.core.errors import (
    Aborted,
    BodyTooLarge,
    BoughError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Quarantined,
    RequestFailed,
    Unavailable,
)
from bough.core.messages import End

_BY_CODE: dict[str, type[BoughError]] = {
    kind.code: kind
    for kind in (
        PromptTooLong,
        BodyTooLarge,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Quarantined,
        RequestFailed,
        Aborted,
    )
    if kind.code is not None
}
_BY_STATUS: dict[int, type[BoughError]] = {
    400: InvalidRequest,
    413: BodyTooLarge,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}

GIVEN_UP = Aborted.status
"""HTTP status of a request that a client or an operator aborted."""


def raise_if_failed(end: End | None, *, whole: bool = False) -> None:
    """Raises the error that a client is to see, if the request has ended without an answer. A request that was aborted by
    name has one, what was generated so far, unless only a `whole` answer will do.

    The error gets no name on the way: it and the frames of its traceback would hold each other, and the request with them,
    until a collection.
    """
    if end is None or end.reason not in ("abort", "error"):
        return
    if whole or end.reason == "error" or end.status not in (0, GIVEN_UP):
        raise as_error(end)


def as_error(end: End) -> BoughError:
    """The error of a failed end, without raising it."""
    kind = _BY_CODE.get(end.code) or _BY_STATUS.get(end.status) or RequestFailed
    return kind(what=end.message or "the request failed", param=end.param or None)
