"""Grammars in Lark's notation, as a grammar tree.

`rule: ...` and `TERMINAL: ...` define, `start` is the whole answer. Taken: "texts" and /patterns/ with flags, ranges
("a".."z"), names, groups, `[optional]`, `|`, `*`, `+`, `?`, `~ n`, `~ n..m`, `{m,n}`, aliases, priorities, `%ignore`, and
`%import` of the terminals of `common`. Refused by name: templates, other imports, `%declare`, `%override`, `%extend`.

A terminal is treated as what it matches; a lexer's preference among terminals does not change which texts are allowed.
Ignored terminals may occur before any terminal and at the end, a limited number of times, so that no answer is filled
up with them.
"""

from __future__ import annotations

import re
from typing import NoReturn

from bough.grammar.ebnf import MAX_RULES, parse_ebnf
from bough.grammar.errors import BadGrammar, shorten
from bough.grammar.regex import MAX_DEPTH, MAX_REPEAT, parse_regex
from bough.grammar.rules import (
    EMPTY,
    Alt,
    Chars,
    Grammar,
    LiteralText,
    Node,
    Ref,
    Repeat,
    Seq,
    alt,
    chars,
    optional,
    repeat,
    seq,
    text,
    walk,
)

_ANY_STRING = r'"(?:[^"\\\n]|\\.)*"'
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": _ANY_STRING,
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""The terminals of Lark's `common`, without its look-behind."""

_DEFINITION = re.compile(r"[?!]*[A-Za-z_]\w*(?:\.-?\d+)?\s*:(?!:=)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_IGNORE = re.compile(r"^\s*%ignore\b", re.MULTILINE)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_MOST_IGNORED = 3
"""Maximum number of consecutive ignored terminals if there are several kinds (a comment between spaces); with a single
kind, one."""


def is_lark(source: str) -> bool:
    """Whether a grammar is written in Lark, and not in EBNF (`name ::= ...`)."""
    comments = ("#", "//", "|")
    first = next((line for each in source.splitlines() if (line := each.strip()) and not line.startswith(comments)), "")
    return first.startswith("%") or _DEFINITION.match(first) is not None


def read_grammar(source: str) -> Grammar:
    """A grammar in EBNF or in Lark's notation, whichever it is. Raises `BadGrammar`."""
    return parse_lark(source) if is_lark(source) else parse_ebnf(source)


def parse_lark(source: str) -> Grammar:
    """The rules of a source. Raises `BadGrammar` with the line of what is wrong."""
    return _Parser(source).whole()


class _Parser:
    def __init__(self, source: str) -> None:
        self._text = source
        self._at = 0
        self._depth = 0
        self._ignores = bool(_IGNORE.search(source))
        self._in_terminal = False
        self._rules: dict[str, Node] = {}
        self._ignored: list[Node] = []
        self._used: dict[str, int] = {}
        """Names that are referred to, and where first."""
        self._names: dict[str, str] = {}
        """Names as written -> as the tree has them."""

    def whole(self) -> Grammar:
        while self._skip() < len(self._text):
            if self._peek() == "%":
                self._directive()
            else:
                self._definition()
        start = self._names.get("start", "")
        if start not in self._rules:
            raise BadGrammar("the grammar has no rule called start")
        for name, at in self._used.items():
            if self._names[name] not in self._rules:
                self._fail(f"{shorten(name)!r} is not defined", at=at)
        self._check_terminals()
        root: Node = Ref(start)
        if self._ignores:
            most = 1 if len(self._ignored) == 1 else _MOST_IGNORED
            self._rules["ignored"] = repeat(alt(*self._ignored), 0, most)
            root = seq(root, Ref("ignored"))
        self._rules["root"] = root
        return Grammar(self._rules, "root")

    # -- definitions ------------------------------------------------------------------------------

    def _definition(self) -> None:
        at = self._at
        while self._peek() in ("?", "!"):
            self._at += 1
        name = self._name()
        if name and self._peek() == "{":
            self._fail("templates are not supported")
        if name and self._peek() == "[":
            self._fail("attributes of rules are not supported")
        if self._peek() == ".":
            self._at += 1
            self._takes("-")
            self._digits("a priority is a number")
        if not name or not self._takes(":"):
            self._fail("a rule begins with `name:`", at=at)
        if self._named(name) in self._rules:
            self._fail(f"{shorten(name)!r} is defined twice", at=at)
        if len(self._rules) >= MAX_RULES:
            self._fail(f"there are more than {MAX_RULES} rules")
        self._in_terminal = _is_terminal(name)
        self._rules[self._named(name)] = self._alternatives()
        self._in_terminal = False

    def _directive(self) -> None:
        at = self._at
        self._at += 1
        kind = self._name()
        if kind == "ignore":
            self._in_terminal = True
            self._ignored.append(self._alternatives())
            self._in_terminal = False
        elif kind == "import":
            self._import(at)
        else:
            self._fail(f"%{shorten(kind)} is not supported", at=at)

    def _import(self, at: int) -> None:
        self._skip()
        if self._name() != "common":
            self._fail("only `common` can be imported", at=at)
        wanted: list[tuple[str, str]] = []
        if self._takes("."):
            name = self._name()
            wanted.append((name, self._alias() or name))
        elif self._takes("("):
            while not self._takes(")"):
                self._skip()
                name = self._name()
                if not name:
                    self._fail("an import lists names", at=at)
                wanted.append((name, name))
                self._takes(",")
        else:
            self._fail("an import names terminals", at=at)
        for name, known_as in wanted:
            if name not in COMMON:
                self._fail(f"`common` has no terminal {shorten(name)!r}", at=at)
            self._rules[self._named(known_as)] = parse_regex(COMMON[name])

    def _alias(self) -> str:
        if not self._takes("->"):
            return ""
        self._skip()
        return self._name()

    def _named(self, name: str) -> str:
        """Rules keep their order and get new names, because backends might not accept the original ones."""
        if name not in self._names:
            kind = "term" if _is_terminal(name) else "rule"
            self._names[name] = f"{kind}_{len(self._names)}"
        return self._names[name]

    def _check_terminals(self) -> None:
        """Raises `BadGrammar` if a terminal refers to a rule or, directly or indirectly, to itself."""
        below = {
            name: {each.name for each in walk(node) if isinstance(each, Ref) and each.name.startswith("term_")}
            for name, node in self._rules.items()
            if name.startswith("term_")
        }
        done: set[str] = set()
        while ready := {name for name, parts in below.items() if name not in done and parts <= done}:
            done |= ready
        if len(done) < len(below):
            name = next(written for written, known in self._names.items() if known in below and known not in done)
            raise BadGrammar(f"the terminal {shorten(name)!r} leads back to itself: write it as a rule")

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
            if self._text.startswith("->", self._at):
                self._alias()
                continue
            if self._peek() in ("", "|", ")", "]", "%") or _DEFINITION.match(self._text, self._at):
                return seq(*parts) if parts else EMPTY
            parts.append(self._quantified(self._atom()))

    def _atom(self) -> Node:
        letter = self._peek()
        if letter in ('"', "'"):
            return self._lexed(self._range_or_text(letter))
        if letter == "/":
            return self._lexed(self._pattern())
        if letter == "(":
            return self._group(")")
        if letter == "[":
            return optional(self._group("]"))
        at = self._at
        name = self._name()
        if not name:
            self._fail(f"{letter!r} is not expected here")
        if self._in_terminal and not _is_terminal(name):
            self._fail(f"the terminal has the rule {shorten(name)!r} in it", at=at)
        if self._peek() == "{" and not re.match(r"\{\s*\d+\s*(,\s*\d*\s*)?\}", self._text[self._at : self._at + 32]):
            self._fail("templates are not supported", at=at)
        self._used.setdefault(name, at)
        found = Ref(self._named(name))
        return self._lexed(found) if _is_terminal(name) else found

    def _lexed(self, node: Node) -> Node:
        """A terminal in a rule, which what is ignored may precede."""
        return seq(Ref("ignored"), node) if self._ignores and not self._in_terminal else node

    def _group(self, closing: str) -> Node:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep")
        node = self._alternatives()
        if not self._takes(closing):
            self._fail("a group is not closed")
        self._depth -= 1
        return node

    def _quantified(self, node: Node) -> Node:
        while True:
            self._skip_inline()
            letter = self._peek()
            if letter and letter in "*+?":
                self._at += 1
                node = repeat(node, int(letter == "+"), 1 if letter == "?" else None)
            elif letter == "~":
                node = repeat(node, *self._times())
            elif letter == "{":
                node = repeat(node, *self._bounds())
            else:
                return node
            if sum(1 for _ in walk(node)) > 10_000:
                self._fail("a rule has too many parts")

    def _times(self) -> tuple[int, int]:
        self._at += 1
        low = self._digits("a repetition is written ~ n or ~ n..m")
        high = self._digits("a repetition is written ~ n or ~ n..m") if self._takes("..") else low
        return self._checked(low, high), high

    def _bounds(self) -> tuple[int, int | None]:
        self._at += 1
        low = self._digits("a repetition is written {m}, {m,} or {m,n}")
        high: int | None = low
        if self._takes(","):
            self._skip()
            high = self._digits("") if self._peek().isdigit() else None
        if not self._takes("}"):
            self._fail("a repetition is written {m}, {m,} or {m,n}")
        return self._checked(low, high), high

    def _checked(self, low: int, high: int | None) -> int:
        if max(low, high or 0) > MAX_REPEAT:
            self._fail(f"a repetition of more than {MAX_REPEAT} is too large")
        if high is not None and high < low:
            self._fail("a repetition's upper bound is below its lower one")
        return low

    # -- characters -------------------------------------------------------------------------------

    def _range_or_text(self, quote: str) -> Node:
        first = self._string(quote)
        if self._takes(".."):
            self._skip()
            last = self._string(self._peek())
            if len(first) != 1 or len(last) != 1 or last < first:
                self._fail("a range goes from one character to a later one")
            return chars(((ord(first), ord(last)),))
        if self._peek() == "i":
            self._at += 1
            return any_case(text(first))
        return text(first)

    def _string(self, quote: str) -> str:
        if quote not in ('"', "'"):
            self._fail("a range goes from one character to a later one")
        self._at += 1
        letters: list[str] = []
        while self._peek() != quote:
            if self._peek() in ("", "\n"):
                self._fail("a text is not closed")
            letters.append(self._letter())
        self._at += 1
        return "".join(letters)

    def _letter(self) -> str:
        letter = self._text[self._at]
        self._at += 1
        if letter != "\\":
            return letter
        letter = self._peek()
        self._at += 1
        if letter in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[letter]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX_DIGITS[letter]}}}", digits):
                self._fail(f"the escape \\{letter} needs {_HEX_DIGITS[letter]} hexadecimal digits")
            self._at += len(digits)
            point = int(digits, 16)
            if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
                self._fail("an escape names no character")
            return chr(point)
        return _ESCAPES.get(letter, letter)

    def _pattern(self) -> Node:
        """`/.../` and the letters behind it."""
        begin = self._at
        end = begin + 1
        while end < len(self._text) and self._text[end] not in "/\n":
            end += 2 if self._text[end] == "\\" else 1
        if self._text[end : end + 1] != "/":
            self._fail("a pattern is not closed")
        pattern = self._text[begin + 1 : end].replace("\\/", "/")
        self._at = end + 1
        flags = re.compile("[a-z]*").match(self._text, self._at)
        assert flags is not None
        self._at = flags.end()
        if set(flags[0]) - set("imslu"):
            self._fail(f"the flags {shorten(flags[0])!r} of a pattern are not supported")
        try:
            node = parse_regex(pattern, dot_all="s" in flags[0])
        except BadGrammar as error:
            line = self._text.count("\n", 0, begin) + 1
            raise BadGrammar(f"{error} (line {line})") from error
        return any_case(node) if "i" in flags[0] else node

    # -- reading ----------------------------------------------------------------------------------

    def _skip_inline(self) -> None:
        while self._peek() in (" ", "\t"):
            self._at += 1

    def _skip(self) -> int:
        """Passes white space and comments."""
        while self._at < len(self._text):
            if self._text[self._at].isspace():
                self._at += 1
            elif self._text.startswith("//", self._at) or self._peek() == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                break
        return self._at

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, symbol: str) -> bool:
        before = self._at
        self._skip()
        if self._text.startswith(symbol, self._at):
            self._at += len(symbol)
            return True
        self._at = before
        return False

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _digits(self, otherwise: str) -> int:
        self._skip_inline()
        found = re.compile(r"\d{1,9}").match(self._text, self._at)
        if found is None:
            self._fail(otherwise)
        self._at = found.end()
        return int(found[0])

    def _fail(self, what: str, *, at: int | None = None) -> NoReturn:
        line = self._text.count("\n", 0, self._at if at is None else at) + 1
        raise BadGrammar(f"the grammar can't be read: {what} (line {line})")


def _is_terminal(name: str) -> bool:
    return name.strip("_0123456789").isupper()


def any_case(node: Node) -> Node:
    """The node, matching without regard to case."""
    match node:
        case LiteralText():
            return seq(*(_either(ord(each), ord(each)) for each in node.value))
        case Chars():
            return alt(*(_either(low, high) for low, high in node.ranges)) if len(node.ranges) < 64 else node
        case Seq():
            return seq(*(any_case(part) for part in node.parts))
        case Alt():
            return alt(*(any_case(part) for part in node.parts))
        case Repeat():
            return repeat(any_case(node.node), node.low, node.high)
        case _:
            return node


def _either(low: int, high: int) -> Node:
    """A range of characters with their other cases; those of large ranges are in them already."""
    ranges = [(low, high)]
    for point in range(low, min(high, low + 512) + 1):
        for other in (chr(point).lower(), chr(point).upper()):
            if len(other) == 1:
                ranges.append((ord(other), ord(other)))
    return chars(ranges)
