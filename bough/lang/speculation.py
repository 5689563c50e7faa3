"""API speculation: one call to an API generates past the next `gen`, and later expressions are served from its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Speculation:
    """Text that a completion API has already written beyond the program's own position."""

    ahead: str = ""

    def advance(self, text: str) -> None:
        """The program appended `text`: keep what follows it, or nothing if the model had written something else."""
        self.ahead = self.ahead[len(text) :] if text and self.ahead.startswith(text) else ""

    def take(self, stops: Sequence[str]) -> str | None:
        """The result of a `gen` with these stop strings, from text generated in advance; None if that contains no
        stop."""
        found = [at for at in (self.ahead.find(stop) for stop in stops) if at >= 0]
        if not found:
            return None
        end = min(found)
        value, self.ahead = self.ahead[:end], self.ahead[end:]
        return value


@dataclass(frozen=True, slots=True)
class Blank:
    """A place in a message that the model fills, up to one of `stops`."""

    stops: tuple[str, ...]


def match_format(pattern: Sequence[str | Blank], reply: str) -> list[str] | None:
    """The texts that fill the blanks so that `pattern` becomes `reply`; None where the reply does not follow it."""
    filled: list[str] = []
    rest = reply.lstrip()
    for i, piece in enumerate(pattern):
        if isinstance(piece, str):
            wanted = piece.lstrip() if i == 0 else piece
            if not rest.startswith(wanted):
                return None
            rest = rest[len(wanted) :]
            continue
        following = pattern[i + 1] if i + 1 < len(pattern) else None
        ends = piece.stops + ((following,) if isinstance(following, str) else ())
        found = [at for at in (rest.find(end) for end in ends) if at >= 0]
        if not found and following is not None:
            return None
        end = min(found) if found else len(rest)
        filled.append(rest[:end])
        rest = rest[end:]
    return filled
