"""How a request ended, as an error where it ended badly."""

from __future__ import annotations

from bough.core.errors import (
    BodyTooLarge,
    BoughError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    Unavailable,
)
from bough.core.messages import End

_BY_CODE: dict[str, type[BoughError]] = {
    kind.code: kind
    for kind in (PromptTooLong, BodyTooLarge, Overloaded, Unavailable, DeadlineExceeded, RequestFailed)
    if kind.code is not None
}
_BY_STATUS: dict[int, type[BoughError]] = {
    400: InvalidRequest,
    413: BodyTooLarge,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}


class Aborted(BoughError):
    """The request was aborted by somebody else: an abort call, a pause, a drain."""

    status = 503
    type = "aborted_error"
    code = "aborted"


def failure(end: End) -> BoughError | None:
    """The error that a client is to see, or None if the request ended as it should."""
    if end.reason not in ("abort", "error"):
        return None
    kind = _BY_CODE.get(end.code) or _BY_STATUS.get(end.status)
    if kind is None:
        kind = Aborted if end.reason == "abort" else RequestFailed
    return kind(what=end.message or ("the request was aborted" if end.reason == "abort" else "the request failed"))
