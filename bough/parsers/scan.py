"""Finding markers in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from bough.core.messages import ParsedEvent

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")


class Markers:
    """A fixed set of literal markers.

    No marker may be a prefix of another, nor stand inside another except at its end: then the leftmost match is the
    same however the text was cut.
    """

    def __init__(self, *markers: str) -> None:
        for marker in markers:
            for other in markers:
                if marker != other and marker in other and not (other.endswith(marker) and other.count(marker) == 1):
                    raise ValueError(f"marker {marker!r} stands inside {other!r}")
        self.all = tuple(dict.fromkeys(markers))
        self.longest = max((len(m) for m in self.all), default=0)
        self._firsts = frozenset(m[0] for m in self.all)
        by_length = sorted(self.all, key=len, reverse=True)
        self._regex: re.Pattern[str] | None = re.compile("|".join(map(re.escape, by_length))) if self.all else None

    def find(self, text: str, start: int, *, within: int | None = None) -> tuple[int, str] | None:
        """Position and marker of the leftmost one that begins at or after `start`, at most `within` characters on."""
        until = len(text) if within is None else start + within + self.longest
        if self._regex is None or (found := self._regex.search(text, start, until)) is None:
            return None
        if within is not None and found.start() - start > within:
            return None
        return found.start(), found.group()

    def partial(self, text: str, start: int) -> int:
        """Where the longest suffix of the text that may become a marker begins (the text's length: nowhere)."""
        for i in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[i] in self._firsts and self.may_start_with(text[i:]):
                return i
        return len(text)

    def at(self, text: str, pos: int) -> str | None:
        """The marker that stands exactly at `pos`."""
        if self._regex is None or (found := self._regex.match(text, pos)) is None:
            return None
        return found.group()

    def may_start_with(self, suffix: str) -> bool:
        """Whether more text can turn `suffix` into a marker."""
        return any(len(suffix) < len(m) and m.startswith(suffix) for m in self.all)


@lru_cache(maxsize=1024)
def markers_of(*markers: str) -> Markers:
    """One shared object per set of markers."""
    return Markers(*markers)


class Cursor:
    """The text not yet consumed. The rest between two feeds is short: a part of a marker or of a name."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0

    def feed(self, text: str) -> None:
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def at_end(self) -> bool:
        return self.pos >= len(self.text)

    def rest(self) -> str:
        return self.text[self.pos :]

    def take_rest(self) -> str:
        rest = self.text[self.pos :]
        self.pos = len(self.text)
        return rest

    def skip_space(self) -> None:
        found = _SPACES.match(self.text, self.pos)
        assert found is not None
        self.pos = found.end()

    def word(self, ends: Markers, longest: int) -> tuple[str, str] | None:
        """The text before the next of `ends`, and which one; consumes both. None: the end is not there (yet)."""
        found = ends.find(self.text, self.pos, within=longest)
        if found is None:
            return None
        at, end = found
        word = self.text[self.pos : at]
        self.pos = at + len(end)
        return word, end

    def no_word(self, ends: Markers, longest: int, *, spaces: bool = False) -> bool:
        """Whether `word`, which found nothing, can't succeed any more: the text is too long, or has white space
        although not `spaces`."""
        length = min(ends.partial(self.text, self.pos) - self.pos, longest + 1)
        return length > longest or (not spaces and len(self.text[self.pos : self.pos + length].split()) > 1)

    def waits_for(self, markers: Markers) -> bool:
        """Whether all that is left may be the beginning of a marker."""
        rest = len(self.text) - self.pos
        return rest == 0 or (rest < markers.longest and markers.may_start_with(self.text[self.pos :]))


class Parser(Protocol):
    """One incremental parser of one answer. Feeding the whole text at once is the non-streaming case.

    needs_special_tokens: the format's markers are special tokens of its tokenizers, so detokenising must keep them;
    markers: exactly which texts it looks for (other special tokens may still be skipped).
    """

    @property
    def needs_special_tokens(self) -> bool: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    def feed(self, text: str) -> list[ParsedEvent]: ...

    def finish(self) -> list[ParsedEvent]: ...


IdFactory = Callable[[], str]
