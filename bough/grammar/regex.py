r"""Regular expressions as grammar trees: the part that a finite automaton can follow.

Taken: literals, classes, `.`, `\d \w \s` (ASCII) and their opposites, `\p{..}`, groups, alternatives, quantifiers, anchors
at the ends. Refused, with the place: look-around, back references, word boundaries, flags, possessive quantifiers.
"""

from __future__ import annotations

import functools
import sys
import unicodedata
from typing import NoReturn

from bough.grammar.errors import BadGrammar
from bough.grammar.rules import (
    EMPTY,
    MAX_CODE_POINT,
    NOTHING,
    Alt,
    Chars,
    LiteralText,
    Node,
    Ranges,
    Ref,
    Repeat,
    Seq,
    alt,
    chars,
    complement,
    merge_ranges,
    repeat,
    seq,
    text,
    without,
)

MAX_DEPTH = 64
MAX_REPEAT = 65_535
_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32))
_SETS: dict[str, Ranges] = {
    "d": _DIGIT,
    "D": complement(_DIGIT),
    "w": _WORD,
    "W": complement(_WORD),
    "s": _SPACE,
    "S": complement(_SPACE),
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}
_ANY_BUT_NEWLINE = complement(((10, 10),))

START = Ref("^")
END = Ref("$")
"""Anchors, until `_place_anchors` has taken them out."""


def parse_regex(pattern: str, *, dot_all: bool = False) -> Node:
    """The tree that the whole text must match. `dot_all`: a dot also matches line breaks."""
    return _place_anchors(_Parser(pattern, dot_all=dot_all).whole(), EMPTY, EMPTY)


def parse_search(pattern: str, any_text: Node) -> Node:
    """The tree of texts that contain the pattern: `any_text` is added where it is not anchored."""
    return _place_anchors(_Parser(pattern).whole(), any_text, any_text)


def _place_anchors(node: Node, before: Node, after: Node) -> Node:
    """Puts `before` and `after` around the branches that don't begin or end with an anchor."""
    if isinstance(node, Alt):
        return alt(*(_place_anchors(part, before, after) for part in node.parts))
    parts = list(node.parts) if isinstance(node, Seq) else [node]
    while parts and parts[0] == START:
        parts.pop(0)
        before = EMPTY
    while parts and parts[-1] == END:
        parts.pop()
        after = EMPTY
    if parts and isinstance(parts[0], Alt) and _has_anchor(parts[0]):
        if len(parts) == 1:
            return _place_anchors(parts[0], before, after)
        parts[0] = _place_anchors(parts[0], before, EMPTY)
        before = EMPTY
    if parts and isinstance(parts[-1], Alt) and _has_anchor(parts[-1]):
        parts[-1] = _place_anchors(parts[-1], EMPTY, after)
        after = EMPTY
    if any(_has_anchor(part) for part in parts):
        raise BadGrammar("the pattern has ^ or $ in the middle, where nothing can match it")
    return seq(before, *parts, after)


def _has_anchor(node: Node) -> bool:
    if node in (START, END):
        return True
    match node:
        case Seq() | Alt():
            return any(_has_anchor(part) for part in node.parts)
        case Repeat():
            return _has_anchor(node.node)
        case _:
            return False


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, *, dot_all: bool = False) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._dot = complement(()) if dot_all else _ANY_BUT_NEWLINE

    def whole(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            self._fail("a closing parenthesis has no opening one")
        return node

    # -- structure --------------------------------------------------------------------------------

    def _alternatives(self) -> Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else alt(*branches)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._peek() not in "|)":
            parts.append(self._quantified())
        return seq(*parts)

    def _quantified(self) -> Node:
        begin = self._at
        node = self._atom()
        quantified = False
        while True:
            bounds = self._quantifier()
            if bounds is None:
                return node
            if quantified or node in (START, END):
                self._at = begin
                self._fail("a quantifier has nothing to repeat")
            quantified = True
            node = repeat(node, *bounds)
            if self._take("+"):
                self._fail("possessive quantifiers are not supported")
            self._take("?")

    def _quantifier(self) -> tuple[int, int | None] | None:
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        if self._peek() != "{":
            return None
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, 0)].partition(",")
        if end < 0 or not _is_count(low) or (high and not _is_count(high)):
            return None
        if not comma:
            high = low
        bounds = int(low), int(high) if high else None
        if bounds[0] > MAX_REPEAT or (bounds[1] or 0) > MAX_REPEAT:
            self._fail(f"a repetition of more than {MAX_REPEAT} is too large")
        if bounds[1] is not None and bounds[1] < bounds[0]:
            self._fail("a repetition's upper bound is below its lower one")
        self._at = end + 1
        return bounds

    def _atom(self) -> Node:
        letter = self._next()
        match letter:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return chars(self._dot)
            case "^":
                return START
            case "$":
                return END
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                self._fail("a quantifier has nothing to repeat", back=1)
        return text(letter)

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep")
        if self._take("?"):
            self._group_kind()
        node = self._alternatives()
        if not self._take(")"):
            self._fail("a group is not closed")
        self._depth -= 1
        return node

    def _group_kind(self) -> None:
        if self._take(":"):
            return
        for opening in ("=", "!", "<=", "<!"):
            if self._text.startswith(opening, self._at):
                self._fail("look-ahead and look-behind are not supported")
        named = "P<" if self._text.startswith("P<", self._at) else "<"
        if self._text.startswith(named, self._at):
            end = self._text.find(">", self._at)
            if end > 0:
                self._at = end + 1
                return
        self._fail("this kind of group is not supported")

    # -- characters -------------------------------------------------------------------------------

    def _escape(self) -> Node:
        letter = self._next()
        if letter in _SETS:
            return chars(_SETS[letter])
        if letter in "pP":
            return chars(self._property(negated=letter == "P"))
        if letter == "A":
            return START
        if letter in "zZ":
            return END
        if letter in "bB":
            self._fail("word boundaries are not supported", back=2)
        if letter in "123456789k":
            self._fail("back references are not supported", back=2)
        return text(self._escaped(letter))

    def _escaped(self, letter: str) -> str:
        """The character that `\\letter...` stands for."""
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "x":
            return self._code_point(2)
        if letter == "u":
            return self._code_point(4)
        if letter == "U":
            return self._code_point(8)
        if letter == "c":
            return chr(ord(self._next()) & 31)
        if letter.isascii() and letter.isalnum():
            self._fail(f"the escape \\{letter} is not known", back=2)
        return letter

    def _code_point(self, num_digits: int) -> str:
        if self._take("{"):
            end = self._text.find("}", self._at)
            digits = self._text[self._at : max(end, self._at)]
            self._at = end + 1
        else:
            digits = self._text[self._at : self._at + num_digits]
            self._at += num_digits
            if len(digits) < num_digits:
                digits = ""
        if not digits or any(each not in "0123456789abcdefABCDEF" for each in digits) or len(digits) > 8:
            self._fail("an escape needs hexadecimal digits")
        value = int(digits, 16)
        if value > MAX_CODE_POINT or 0xD800 <= value <= 0xDFFF:
            self._fail("an escape names no character")
        return chr(value)

    def _property(self, *, negated: bool) -> Ranges:
        name = self._next()
        if name == "{":
            end = self._text.find("}", self._at)
            name = self._text[self._at : max(end, self._at)]
            self._at = max(end, self._at) + 1
        if name.startswith("^"):
            name, negated = name[1:], not negated
        found = _category(name.removeprefix("gc=").removeprefix("General_Category="))
        if not found:
            self._fail(f"the property {name[:30]!r} is not known: general categories such as L, Lu or Nd are")
        return complement(found) if negated else found

    def _class(self) -> Node:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            if self._peek() == "":
                self._fail("a class is not closed")
            if self._text.startswith("[:", self._at):
                self._fail("POSIX classes are not supported")
            low = self._class_part()
            if (
                isinstance(low, str)
                and self._peek() == "-"
                and self._text[self._at + 1 : self._at + 2] not in ("]", "")
            ):
                self._at += 1
                high = self._class_part()
                if not isinstance(high, str) or high < low:
                    self._fail("a range in a class has no order")
                ranges.append((ord(low), ord(high)))
            elif isinstance(low, str):
                ranges.append((ord(low), ord(low)))
            else:
                ranges.extend(low)
        self._at += 1
        merged = merge_ranges(ranges)
        node = chars(complement(merged) if negated else merged)
        if node == NOTHING:
            self._fail("a class has no characters")
        return node

    def _class_part(self) -> str | Ranges:
        letter = self._next()
        if letter != "\\":
            return letter
        letter = self._next()
        if letter in _SETS:
            return _SETS[letter]
        if letter in "pP":
            return self._property(negated=letter == "P")
        return "\b" if letter == "b" else self._escaped(letter)

    # -- reading ----------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, letter: str) -> bool:
        if self._peek() == letter:
            self._at += 1
            return True
        return False

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._fail("the pattern ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _fail(self, what: str, *, back: int = 0) -> NoReturn:
        raise BadGrammar(f"the pattern can't be used: {what} (character {max(self._at - back, 0) + 1})")


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= 9


@functools.cache
def _category(name: str) -> Ranges:
    """Characters of a general category; empty if there is no category of that name."""
    if not name or len(name) > 2 or not name.isascii():
        return ()
    ranges: list[tuple[int, int]] = []
    begin = -1
    for point in range(sys.maxunicode + 2):
        inside = point <= sys.maxunicode and unicodedata.category(chr(point)).startswith(name)
        if inside and begin < 0:
            begin = point
        elif not inside and begin >= 0:
            ranges.append((begin, point - 1))
            begin = -1
    return tuple(ranges)


# -- inside a JSON string --------------------------------------------------------------------------

_ESCAPED: Ranges = ((0, 31), (34, 34), (92, 92))
"""Characters that a JSON string does not have as they are."""
_NAMED = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}


def in_json(node: Node) -> Node:
    """The same language, escaped as in a JSON string. Control characters without a short escape are left out."""
    match node:
        case LiteralText():
            return seq(*(in_json(Chars(((ord(each), ord(each)),))) for each in node.value))
        case Chars():
            bare = without(node.ranges, _ESCAPED)
            escaped = [name for point, name in _NAMED.items() if any(low <= point <= high for low, high in node.ranges)]
            plain: Node = NOTHING
            if bare:
                only = bare[0][0]
                plain = LiteralText(chr(only)) if bare == ((only, only),) else chars(bare)
            if not escaped:
                return plain
            short = alt(*(LiteralText("\\" + name) for name in escaped))
            return alt(plain, short) if plain != NOTHING else short
        case Seq():
            return seq(*(in_json(part) for part in node.parts))
        case Alt():
            return alt(*(in_json(part) for part in node.parts))
        case Repeat():
            return repeat(in_json(node.node), node.low, node.high)
        case _:
            return node
