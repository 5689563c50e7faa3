"""A JSON value that arrives in pieces: validated, repaired where models commonly err, and passed on at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

MAX_DEPTH = 256
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACES = re.compile(r"[ \t\r\n]*")
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]+")
_LONGEST_WORD = 5
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
    "NaN": "null",
}
_HEX = frozenset("0123456789abcdefABCDEF")
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class _At(Enum):
    VALUE = 0
    FIRST_ITEM = 1
    FIRST_KEY = 2
    KEY = 3
    COLON = 4
    NEXT = 5
    STRING = 6
    ESCAPE = 7
    HEX = 8
    NUMBER = 9
    WORD = 10
    DONE = 11
    FAILED = 12


class JsonStream:
    """Consumes exactly one JSON value; `take()` returns its text as far as it is certain. Repaired: raw control
    characters and unknown escapes in strings, trailing commas, Python's True, False and None. Anything else that is not
    JSON fails; `pending()` is then what was consumed but not handed out. The output of a finished stream is always
    valid JSON, of an unfinished one always a prefix of it.
    """

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._stack: list[str] = []
        self._is_key = False
        self._word_length = 0
        self._held: list[str] = []  # a comma with its white space, or a token that is not whole yet
        self._out: list[str] = []
        self._steps: dict[_At, Callable[[str, int], int]] = {
            _At.VALUE: self._value,
            _At.FIRST_ITEM: self._first_item,
            _At.FIRST_KEY: self._key,
            _At.KEY: self._key,
            _At.COLON: self._colon,
            _At.NEXT: self._next,
            _At.STRING: self._string,
            _At.ESCAPE: self._escape,
            _At.HEX: self._hex,
            _At.NUMBER: self._number,
            _At.WORD: self._word,
        }

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        return self._at is _At.FAILED

    def consume(self, text: str, pos: int) -> int:
        """Consumes from `pos`; returns the position where it stopped: the end of the text, of the value, or the invalid
        character."""
        while pos < len(text) and self._at is not _At.DONE and self._at is not _At.FAILED:
            pos = self._steps[self._at](text, pos)
        return pos

    def close(self) -> None:
        """Ends the text: a number or word at the top level is now complete; any other unfinished value fails."""
        if self._at in (_At.NUMBER, _At.WORD) and not self._stack:
            self._end_token()
        if self._at is not _At.DONE:
            self._at = _At.FAILED

    def take(self) -> str:
        out, self._out = "".join(self._out), []
        return out

    def pending(self) -> str:
        return "".join(self._held)

    # -- states: consume something at pos, return the new position -------------------------------------------------

    def _spaces(self, text: str, pos: int) -> int:
        found = _SPACES.match(text, pos)
        assert found is not None
        if found.end() > pos:
            (self._held if self._held else self._out).append(found.group())
        return found.end()

    def _release(self) -> None:
        self._out.extend(self._held)
        self._held.clear()

    def _value(self, text: str, pos: int) -> int:
        pos = self._spaces(text, pos)
        if pos == len(text):
            return pos
        char = text[pos]
        if char == '"':
            self._release()
            return self._open_string(False, pos)
        if char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return self._fail(pos)
            self._release()
            self._out.append(char)
            self._stack.append(char)
            self._at = _At.FIRST_KEY if char == "{" else _At.FIRST_ITEM
            return pos + 1
        if char == "]" and self._stack and self._stack[-1] == "[" and self._held:
            return self._close_container(pos)
        if char in "-0123456789":
            self._at = _At.NUMBER
            return pos
        if char.isascii() and char.isalpha():
            self._word_length = 0
            self._at = _At.WORD
            return pos
        return self._fail(pos)

    def _first_item(self, text: str, pos: int) -> int:
        pos = self._spaces(text, pos)
        if pos < len(text) and text[pos] == "]":
            return self._close_container(pos)
        if pos < len(text):
            self._at = _At.VALUE
        return pos

    def _key(self, text: str, pos: int) -> int:
        pos = self._spaces(text, pos)
        if pos == len(text):
            return pos
        if text[pos] == '"':
            self._release()
            return self._open_string(True, pos)
        if text[pos] == "}":
            return self._close_container(pos)
        return self._fail(pos)

    def _colon(self, text: str, pos: int) -> int:
        pos = self._spaces(text, pos)
        if pos == len(text):
            return pos
        if text[pos] != ":":
            return self._fail(pos)
        self._out.append(":")
        self._at = _At.VALUE
        return pos + 1

    def _next(self, text: str, pos: int) -> int:
        pos = self._spaces(text, pos)
        if pos == len(text):
            return pos
        char, inside = text[pos], self._stack[-1]
        if char == ",":
            self._held.append(",")
            self._at = _At.KEY if inside == "{" else _At.VALUE
            return pos + 1
        if char == ("}" if inside == "{" else "]"):
            return self._close_container(pos)
        return self._fail(pos)

    def _close_container(self, pos: int) -> int:
        self._held.clear()  # a trailing comma
        self._out.append("}" if self._stack.pop() == "{" else "]")
        self._after_value()
        return pos + 1

    def _open_string(self, is_key: bool, pos: int) -> int:
        self._is_key = is_key
        self._out.append('"')
        self._at = _At.STRING
        return pos + 1

    def _string(self, text: str, pos: int) -> int:
        if plain := _PLAIN.match(text, pos):
            self._out.append(plain.group())
            return plain.end()
        char = text[pos]
        if char == '"':
            self._out.append('"')
            if self._is_key:
                self._at = _At.COLON
            else:
                self._after_value()
        elif char == "\\":
            self._held.append("\\")
            self._at = _At.ESCAPE
        else:
            self._out.append(_CONTROL[char] if char in _CONTROL else f"\\u{ord(char):04x}")
        return pos + 1

    def _escape(self, text: str, pos: int) -> int:
        char = text[pos]
        if char == "u":
            self._held.append("u")
            self._at = _At.HEX
            return pos + 1
        self._held.clear()
        self._at = _At.STRING
        if char in '"\\/bfnrt':
            self._out.append("\\" + char)
            return pos + 1
        if char == "'":
            self._out.append("'")
            return pos + 1
        self._out.append("\\\\")  # an unknown escape is a backslash the model forgot to double
        return pos

    def _hex(self, text: str, pos: int) -> int:
        if text[pos] in _HEX:
            self._held.append(text[pos])
            if len(self._held) == 6:
                self._release()
                self._at = _At.STRING
            return pos + 1
        self._out.append("\\\\" + "".join(self._held)[1:])
        self._held.clear()
        self._at = _At.STRING
        return pos

    def _number(self, text: str, pos: int) -> int:
        found = _NUMBER_CHARS.match(text, pos)
        if found is None:
            return self._end_token(pos)
        self._held.append(found.group())
        return found.end()

    def _word(self, text: str, pos: int) -> int:
        char = text[pos]
        if not (char.isascii() and char.isalpha()):
            return self._end_token(pos)
        if self._word_length == _LONGEST_WORD:
            return self._fail(pos)
        self._word_length += 1
        self._held.append(char)
        return pos + 1

    def _end_token(self, pos: int = 0) -> int:
        held = "".join(self._held)
        body = held.lstrip(", \t\r\n")
        lead = held[: len(held) - len(body)]
        if self._at is _At.NUMBER and _NUMBER.fullmatch(body):
            self._out.append(lead + body)
        elif self._at is _At.WORD and body in _WORDS:
            self._out.append(lead + _WORDS[body])
        else:
            return self._fail(pos)
        self._held.clear()
        self._after_value()
        return pos

    def _after_value(self) -> None:
        self._at = _At.NEXT if self._stack else _At.DONE

    def _fail(self, pos: int) -> int:
        self._at = _At.FAILED
        return pos


def mend_json(text: str, *, root: str | None = None) -> str | None:
    """`text` as valid JSON if it is one value (opening with `root`, where given) and nothing else."""
    stripped = text.strip(" \t\r\n")
    if not stripped or (root is not None and not stripped.startswith(root)):
        return None
    stream = JsonStream()
    end = stream.consume(stripped, 0)
    stream.close()
    return stream.take() if stream.done and end == len(stripped) else None
