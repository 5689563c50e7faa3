"""Transcripts of models that write something before what was said."""

from __future__ import annotations


class BehindMark:
    """What stands behind the first mark of a text that comes in parts."""

    def __init__(self, mark: str) -> None:
        """`mark` empty: all of it is wanted."""
        self._mark = mark
        self._held = ""

    def more(self, text: str) -> str:
        """The part of it that is wanted."""
        if not self._mark:
            return text
        self._held += text
        _, mark, behind = self._held.partition(self._mark)
        if not mark:
            return ""
        self._mark = self._held = ""
        return behind

    def rest(self) -> str:
        """At the end: all of a text that has no mark."""
        held, self._held = self._held, ""
        return held
