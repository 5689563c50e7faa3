"""Renders all errors: a client gets a status, a type, a code and a message. The text of exceptions other than
`BoughError` is never shown, because it may contain paths or data of other clients; they are logged with the request's
id, which the client gets.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from bough.core.errors import BodyTooLarge, BoughError, InvalidRequest, NotFound, Overloaded, Unavailable
from bough.entrypoints.stream import DONE, ClientGone, event

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

CLIENT_GONE = 499
"""nginx's status for "the client closed its connection"; it appears only in logs."""

ANTHROPIC_PREFIX = "/v1/messages"
OLLAMA_PREFIX = "/api/"

_OPENAI_WORDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_OLLAMA_WORDS = {
    "max_new_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "sampling_seed": "seed",
    "response_format": "format",
}  # fmt: skip
_WORDS: dict[str, dict[str, str]] = {
    "/v1/chat/completions": {**_OPENAI_WORDS, "prompt": "messages"},
    "/invocations": {**_OPENAI_WORDS, "prompt": "messages"},
    "/v1/completions": {**_OPENAI_WORDS, "input_ids": "prompt"},
    "/v1/responses": {
        **dict.fromkeys(("max_new_tokens", "max_tokens", "max_completion_tokens"), "max_output_tokens"),
        "response_format": "text.format",
    },
    "/v1/messages": {"max_new_tokens": "max_tokens", "response_format": "output_config.format"},
    "/api/chat": _OLLAMA_WORDS,
    "/api/generate": _OLLAMA_WORDS,
    **{path: {"prompt": "text"} for path in ("/generate", "/encode", "/classify")},
    **{path: {"prompt": "query", "token_ids_logprob": "label_token_ids"} for path in ("/v1/score", "/score")},
    **{path: {"prompt": "input"} for path in ("/v1/embeddings", "/v1/classify", "/v1/moderations")},
}
"""Field names of routes where they differ from the engine's, which the shared checks use."""
_NAME = re.compile(r"""(?<!['"\w-])[a-z]+(?:_[a-z]+)+(?!['"\w])""")
"""A field's name within a message; quoted text is the client's own."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def as_bough(error: BaseException) -> BoughError:
    """Any error as one that may be shown."""
    if isinstance(error, BoughError):
        return error
    return BoughError(
        what="the server failed to answer this request",
        why="an internal error, which was logged",
        fix="report it with the request id in the x-request-id header",
    )


def error_body(error: BaseException, path: str = "") -> dict[str, object]:
    """The error in the format of the route's API: OpenAI's, or Anthropic's and Ollama's on their paths."""
    shown = as_bough(error)
    message, param = in_words(shown, path)
    if path.startswith(ANTHROPIC_PREFIX):
        kind = _ANTHROPIC_TYPES.get(shown.status, "api_error" if shown.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if path.startswith(OLLAMA_PREFIX):
        return {"error": message}
    return {"error": {"message": message, "type": shown.type, "param": param, "code": shown.code}}


def in_words(error: BoughError, path: str) -> tuple[str, str | None]:
    """The error's message and field, with the route's field names."""
    words = _WORDS.get(path, {}) if error.status < 500 else {}
    message = error.sentence()
    if not words:
        return message, error.param
    return _NAME.sub(lambda found: words.get(found[0], found[0]), message), words.get(error.param or "", error.param)


class BodyCutOff(BodyTooLarge):
    """A body that was not read to its end: the connection can't be used any more."""


class BodiesFull(Unavailable):
    """A body that was not read to its end because others are being received."""

    code = "bodies_in_flight"
    retry_after_s = 1


def error_headers(error: BaseException) -> dict[str, str]:
    if isinstance(error, BodyCutOff):
        return {"connection": "close"}
    if isinstance(error, BodiesFull):
        return {"connection": "close", "retry-after": str(error.retry_after_s)}
    if isinstance(error, Overloaded | Unavailable) and error.retry_after_s:
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, MethodNotAllowed) and error.allowed:
        return {"allow": error.allowed}
    if isinstance(error, BoughError) and error.status == 401:
        return {"www-authenticate": "Bearer"}
    return {}


def status_of(error: BaseException) -> int:
    """HTTP status: of the error's kind, or the one it was given by the engine."""
    return as_bough(error).status


def error_event(error: BaseException, path: str) -> bytes:
    """The error as the last events of a stream that was already open."""
    return event(error_body(error, path)) + DONE


def error_response(error: BaseException, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """The error as a whole response, as clients of this path expect it."""
    return Response(
        _encode(error_body(error, path)),
        status_code=status_of(error),
        headers={**error_headers(error), **(headers or {})},
        media_type="application/json",
    )


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app, for errors of every kind."""
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        error = _from_http(error, request)
    if not isinstance(error, BoughError):
        _log.error(
            "request failed: %s %s", request.method, request.url.path,
            extra={"request_id": request.scope.get("bough.request_id", "")}, exc_info=error,
        )  # fmt: skip
    return error_response(error, path=request.url.path)


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"
    allowed = ""
    """The allowed methods, as in the header."""


def _from_http(error: HTTPException, request: Request) -> BoughError:
    path = request.url.path
    if error.status_code == 404:
        return NotFound(
            what=f"there is no {_shortened(path)}", why="no route has this path", fix="see /openapi.json for the routes"
        )
    if error.status_code == 405:
        allowed = ", ".join(sorted(_methods(request)))
        refused = MethodNotAllowed(
            what=f"{request.method} is not allowed on {_shortened(path)}",
            why=f"this route takes {allowed}" if allowed else "this route takes other methods",
            fix="see /openapi.json for the routes",
        )
        refused.allowed = allowed
        return refused
    return InvalidRequest(what=str(error.detail), why="the request can't be read as HTTP", fix="check the client")


def _methods(request: Request) -> set[str]:
    """What the routes of the request's path take."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in matching for method in route.methods or ()}


def _shortened(path: str) -> str:
    return path if len(path) <= 200 else path[:200] + "..."
