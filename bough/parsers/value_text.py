"""What the text between an argument's tags says, piece by piece."""

from __future__ import annotations

import html
import re

from bough.parsers.scan import SPACE

_OPEN_ENTITY = re.compile(r"&(?:#[0-9]*|#[xX][0-9a-fA-F]*|[^\t\n\f <&#;]{0,32})\Z")
"""A tail that may become a character reference, or a longer one. The bound is that of `html.unescape`."""


class ValueText:
    """Takes a value's text in pieces and gives back what it says, the same in all however it was cut.

    strips: white space around the value is none of it. unescapes: character references (`&lt;`) stand for characters.
    """

    def __init__(self, *, strips: bool = False, unescapes: bool = False) -> None:
        self._strips = strips
        self._unescapes = unescapes
        self._begun = not strips
        self._entity = ""
        self._space = ""

    def feed(self, piece: str) -> str:
        if self._unescapes:
            piece = self._entity + piece
            cut = found.start() if (found := _OPEN_ENTITY.search(piece)) else len(piece)
            piece, self._entity = piece[:cut], piece[cut:]
        return self._said(piece)

    def end(self) -> str:
        """What was held back; the value is whole."""
        rest, self._entity = self._said(self._entity), ""
        self._space = ""
        return rest

    def _said(self, piece: str) -> str:
        if not self._strips:
            return html.unescape(piece) if self._unescapes else piece
        if not self._begun:
            piece = piece.lstrip(SPACE)
            self._begun = bool(piece)
        body = piece.rstrip(SPACE)
        if not body:
            self._space += piece
            return ""
        said, self._space = self._space + body, piece[len(body) :]
        return html.unescape(said) if self._unescapes else said
