"""Errors of programs, with the line of the program that caused them."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from types import FrameType

from bough.core.errors import BoughError


@dataclass(frozen=True, slots=True)
class Origin:
    """The place in the user's program that appended an expression."""

    filename: str
    line: int
    function: str

    @staticmethod
    def of(frame: FrameType) -> Origin:
        return Origin(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def __str__(self) -> str:
        source = linecache.getline(self.filename, self.line).strip()
        place = f'File "{self.filename}", line {self.line}, in {self.function}'
        return f"{place}: {source}" if source else place


class LangError(BoughError):
    """A program, or the way it was called, is wrong."""

    status = 400
    type = "program_error"

    def __str__(self) -> str:
        return self.sentence()


class UnknownVariable(LangError, KeyError):
    """A program or its caller read a variable that no expression defines."""

    __str__ = LangError.__str__


class Unsupported(LangError):
    """The backend can't do this construct."""


class BackendError(LangError):
    """The backend could not be reached or refused the request; `http_status` is None if there was no response."""

    type = "backend_error"

    def __init__(self, *, what: str, why: str = "", fix: str = "", http_status: int | None = None) -> None:
        super().__init__(what=what, why=why, fix=fix)
        self.http_status = http_status


class ProgramError(LangError):
    """An expression of a running program failed; `origin` is the program's line, `__cause__` the original error."""

    def __init__(self, *, what: str, why: str, fix: str, origin: Origin) -> None:
        super().__init__(what=what, why=why, fix=fix)
        self.origin = origin

    def __str__(self) -> str:
        return f"{self.sentence()}\n  {self.origin}"


def program_error(expression: str, cause: Exception, origin: Origin) -> ProgramError:
    """Wrap the failure of one expression; the cause's own what, why and fix stay readable."""
    if isinstance(cause, ProgramError):
        return cause
    if isinstance(cause, BoughError):
        why = "; ".join(part for part in (cause.what, cause.why) if part)
        error = ProgramError(what=f"{expression} failed", why=why, fix=cause.fix, origin=origin)
    else:
        why = f"{type(cause).__name__}: {cause}"
        error = ProgramError(what=f"{expression} failed", why=why, fix="", origin=origin)
    error.__cause__ = cause
    return error
