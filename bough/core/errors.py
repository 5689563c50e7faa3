"""Errors that say what happened, why, and what to do about it.

Every error a user can meet is a `BoughError`; the CLI prints its three lines and the HTTP renderers put the same text
into the body of whatever dialect was spoken. `status` and `code` are what an HTTP client sees.
"""

from __future__ import annotations

from typing import ClassVar


class BoughError(Exception):
    """An error with its cause and its remedy. `what` alone must make sense to a reader who has never seen the code."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, *, what: str, why: str = "", fix: str = "", param: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.param = param

    def __str__(self) -> str:
        """What tracebacks and logs end with."""
        return self.sentence()

    def sentence(self) -> str:
        """One line for an HTTP body: what; why; fix."""
        return "; ".join(part for part in (self.what, self.why, self.fix) if part)

    def lines(self) -> str:
        """Three labelled lines for a terminal."""
        rows = [f"error: {self.what}"]
        if self.why:
            rows.append(f"  why: {self.why}")
        if self.fix:
            rows.append(f"  fix: {self.fix}")
        return "\n".join(rows)


class InvalidRequest(BoughError):
    """The client sent something that can't be served as it stands."""

    status = 400
    type = "invalid_request_error"


def no_such_token(what: str, vocab_size: int, *, param: str) -> InvalidRequest:
    """For an id that the model does not have; `what` says where it stands."""
    return InvalidRequest(
        what=what,
        why=f"the vocabulary has ids 0 to {vocab_size - 1}",
        fix="send ids of this model's tokenizer",
        param=param,
    )


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


def overflow(context_length: int, what: str, *, fix: str, param: str) -> PromptTooLong:
    """For what does not fit into the context. It begins as OpenAI's message does: clients such as litellm tell this error
    from others by these words, and then shorten the conversation or take another model."""
    begin = f"This model's maximum context length is {context_length} tokens"
    return PromptTooLong(what=f"{begin}; {what}", fix=fix, param=param)


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class Unauthorized(BoughError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(BoughError):
    status = 403
    type = "permission_error"


class Conflict(BoughError):
    status = 409
    type = "conflict_error"


class Overloaded(BoughError):
    """Too much is queued already; the client should come back after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after_s: int = 1


class Unavailable(BoughError):
    """The engine is starting, draining or gone."""

    status = 503
    type = "unavailable_error"
    code = "engine_unavailable"
    retry_after_s: int = 0
    """Seconds after which the client may try again; 0: not known."""


class Aborted(BoughError):
    """The client, or an operator, ended the request by its name. Status 499 is not retried by the official clients."""

    status = 499
    type = "aborted"
    code = "aborted"


class DeadlineExceeded(BoughError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class Quarantined(BoughError):
    """The engine has died of this request before."""

    status = 422
    type = "invalid_request_error"
    code = "quarantined"


class RequestFailed(BoughError):
    """This request failed inside the engine; others were not affected."""

    status = 500
    type = "internal_error"
    code = "request_failed"


class ConfigError(BoughError):
    """The server can't start with these arguments, this model or this machine."""

    type = "config_error"


class WeightsError(ConfigError):
    """A checkpoint does not fit the model: lists every missing, extra and misshaped tensor."""


class UnsupportedModel(ConfigError):
    """No implementation for this architecture or checkpoint format."""
