"""Transcripts of models that write a marker before the transcript."""

from __future__ import annotations


class BehindMark:
    """Returns the part of a streamed text after the first marker."""

    def __init__(self, mark: str) -> None:
        """`mark` empty: returns the whole text."""
        self._mark = mark
        self._held = ""

    def more(self, text: str) -> str:
        """Adds a piece, and returns the part of it after the marker."""
        if not self._mark:
            return text
        self._held += text
        _, mark, behind = self._held.partition(self._mark)
        if not mark:
            return ""
        self._mark = self._held = ""
        return behind

    def rest(self) -> str:
        """At the end: the whole text, if it had no marker."""
        held, self._held = self._held, ""
        return held
