"""EBNF as clients write it (the notation of llama.cpp's GBNF), as a grammar tree.

`name ::= ...` defines a rule, `root` is the whole answer. Taken: "texts" and 'texts' with escapes, [classes], names, groups,
`|`, `*`, `+`, `?`, `{m}`, `{m,}`, `{m,n}`, `.` for any character, and comments from `#` to the end of the line.
"""

from __future__ import annotations

from typing import NoReturn

from bough.grammar.errors import BadGrammar, shorten
from bough.grammar.regex import MAX_DEPTH, MAX_REPEAT
from bough.grammar.rules import (
    EMPTY,
    MAX_CODE_POINT,
    Grammar,
    Node,
    Ref,
    alt,
    chars,
    complement,
    merge_ranges,
    repeat,
    seq,
    text,
    walk,
)

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "e": "\x1b", "a": "\a"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_RULES = 5000


def parse_ebnf(source: str) -> Grammar:
    """The rules of a source. Raises `BadGrammar` with the line of what is wrong."""
    return _Parser(source).whole()


class _Parser:
    def __init__(self, source: str) -> None:
        self._text = source
        self._at = 0
        self._depth = 0
        self._used: dict[str, int] = {}
        """Names that rules refer to, and where first."""
        self._names: dict[str, str] = {}
        """Rule names as written -> as the tree has them."""

    def whole(self) -> Grammar:
        rules: dict[str, Node] = {}
        while self._skip() < len(self._text):
            at = self._at
            name = self._name()
            if not name or not self._takes("::="):
                self._fail("a rule begins with `name ::=`")
            if self._named(name) in rules:
                self._fail(f"the rule {shorten(name)!r} is defined twice", at=at)
            if len(rules) >= MAX_RULES:
                self._fail(f"there are more than {MAX_RULES} rules")
            rules[self._named(name)] = self._alternatives()
        if "root" not in self._names or self._named("root") not in rules:
            raise BadGrammar("the grammar has no rule called root")
        for name, at in self._used.items():
            if self._named(name) not in rules:
                self._fail(f"the rule {shorten(name)!r} is not defined", at=at)
        return Grammar(rules, self._named("root"))

    def _named(self, name: str) -> str:
        """Rules keep their order and get new names, because backends might not accept the original ones."""
        if name not in self._names:
            self._names[name] = "root" if name == "root" else f"rule_{len(self._names)}"
        return self._names[name]

    # -- structure --------------------------------------------------------------------------------

    def _alternatives(self) -> Node:
        branches = [self._sequence()]
        while self._takes("|"):
            branches.append(self._sequence())
        return alt(*branches)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while True:
            self._skip()
            if self._peek() in ("", "|", ")") or self._at_rule():
                return seq(*parts) if parts else EMPTY
            parts.append(self._quantified(self._atom()))

    def _at_rule(self) -> bool:
        """Does the next rule begin here?"""
        before = self._at
        found = bool(self._name()) and self._takes("::=")
        self._at = before
        return found

    def _atom(self) -> Node:
        letter = self._peek()
        if letter in ('"', "'"):
            return text(self._string(letter))
        if letter == "[":
            return self._class()
        if letter == ".":
            self._at += 1
            return chars(((0, MAX_CODE_POINT),))
        if letter == "(":
            return self._group()
        at = self._at
        name = self._name()
        if not name:
            self._fail(f"{letter!r} is not expected here")
        self._used.setdefault(name, at)
        return Ref(self._named(name))

    def _group(self) -> Node:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep")
        if self._peek() == "=":
            self._fail("look-ahead is not supported")
        node = self._alternatives()
        if not self._takes(")"):
            self._fail("a group is not closed")
        self._depth -= 1
        return node

    def _quantified(self, node: Node) -> Node:
        while True:
            letter = self._peek()
            if letter and letter in "*+?":
                self._at += 1
                node = repeat(node, int(letter == "+"), 1 if letter == "?" else None)
            elif letter == "{":
                node = repeat(node, *self._bounds())
            else:
                return node
            if sum(1 for _ in walk(node)) > 10_000:
                self._fail("a rule has too many parts")

    def _bounds(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        low, comma, high = (part.strip() for part in self._text[self._at + 1 : max(end, 0)].partition(","))
        if end < 0 or not _is_count(low) or (high and not _is_count(high)):
            self._fail("a repetition is written {m}, {m,} or {m,n}")
        bounds = int(low), int(high) if high else (None if comma else int(low))
        if max(bounds[0], bounds[1] or 0) > MAX_REPEAT:
            self._fail(f"a repetition of more than {MAX_REPEAT} is too large")
        if bounds[1] is not None and bounds[1] < bounds[0]:
            self._fail("a repetition's upper bound is below its lower one")
        self._at = end + 1
        return bounds

    # -- characters -------------------------------------------------------------------------------

    def _string(self, quote: str) -> str:
        self._at += 1
        letters: list[str] = []
        while self._peek() != quote:
            if self._peek() in ("", "\n"):
                self._fail("a text is not closed")
            letters.append(self._letter())
        self._at += 1
        return "".join(letters)

    def _class(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            if self._peek() in ("", "\n"):
                self._fail("a class is not closed")
            low = high = self._letter()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._letter()
            if high < low:
                self._fail("a range in a class has no order")
            ranges.append((ord(low), ord(high)))
        self._at += 1
        merged = merge_ranges(ranges)
        if not merged and not negated:
            self._fail("a class has no characters")
        return chars(complement(merged) if negated else merged)

    def _letter(self) -> str:
        letter = self._text[self._at]
        self._at += 1
        if letter != "\\":
            return letter
        letter = self._peek()
        self._at += 1
        if letter in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[letter]]
            if len(digits) < _HEX_DIGITS[letter] or any(each not in "0123456789abcdefABCDEF" for each in digits):
                self._fail(f"the escape \\{letter} needs {_HEX_DIGITS[letter]} hexadecimal digits")
            self._at += len(digits)
            point = int(digits, 16)
            if point > MAX_CODE_POINT or 0xD800 <= point <= 0xDFFF:
                self._fail("an escape names no character")
            return chr(point)
        if letter in _ESCAPES:
            return _ESCAPES[letter]
        if not letter or letter.isalnum():
            self._fail(f"the escape \\{letter} is not known")
        return letter

    # -- reading ----------------------------------------------------------------------------------

    def _skip(self) -> int:
        """Passes white space and comments."""
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif letter.isspace():
                self._at += 1
            else:
                break
        return self._at

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, symbol: str) -> bool:
        self._skip()
        if self._text.startswith(symbol, self._at):
            self._at += len(symbol)
            return True
        return False

    def _name(self) -> str:
        end = self._at
        while end < len(self._text) and (self._text[end].isalnum() or self._text[end] in "_-"):
            end += 1
        name, self._at = self._text[self._at : end], end
        return name

    def _fail(self, what: str, *, at: int | None = None) -> NoReturn:
        line = self._text.count("\n", 0, self._at if at is None else at) + 1
        raise BadGrammar(f"the grammar can't be read: {what} (line {line})")


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= 9
