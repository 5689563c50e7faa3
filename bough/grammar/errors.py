"""Errors of grammars, with messages for the client."""

from __future__ import annotations


class BadGrammar(Exception):
    """The source is invalid, or can't be enforced. The message is for the client."""

    def __init__(self, message: str, *, at: str | None = None) -> None:
        self.at = at
        """JSON pointer into the schema; None: there is no schema."""
        place = "" if at is None else f"at {at or '/'}: "
        super().__init__(place + message)


def unsupported(keyword: str, at: str, why: str = "") -> BadGrammar:
    """A keyword that is known and can't be enforced while generating."""
    reason = f": {why}" if why else ""
    return BadGrammar(f"the keyword {keyword!r} can't be enforced while generating{reason}", at=f"{at}/{keyword}")


def shorten(value: object, most: int = 80) -> str:
    shown = value if isinstance(value, str) else repr(value)
    return shown if len(shown) <= most else shown[: most - 3] + "..."
