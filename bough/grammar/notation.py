"""Grammar trees in the notations that backends read: EBNF for xgrammar, Lark for llguidance; and regular expressions."""

from __future__ import annotations

from collections.abc import Callable

from bough.grammar.rules import (
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Grammar,
    LiteralText,
    Node,
    Ref,
    Repeat,
    Seq,
    alt,
    length_range,
    repeat,
    seq,
    walk,
)

_BROAD = 256
"""Character classes with more characters than this are written such that xgrammar can precompute masks with them."""
_WRITTEN_OUT = 8
"""Repetition bounds up to this are states of the automaton; larger bounds of broad classes are counted by the
matcher."""


# -- EBNF -----------------------------------------------------------------------------------------


def to_ebnf(grammar: Grammar) -> str:
    """The grammar as xgrammar reads it; the whole text is `root`."""
    printer = _Ebnf(grammar)
    lines = [f"{name} ::= {printer.show(rule)}" for name, rule in grammar.rules.items()]
    if grammar.root != "root":
        lines.append(f"root ::= {grammar.root}")
    return "\n".join(lines + printer.lines) + "\n"


def counts_far(grammar: Grammar) -> bool:
    """Whether the grammar counts more characters than can be written out as a repetition. xgrammar's masks then take
    milliseconds each."""
    printer = _Ebnf(grammar)
    return any(
        isinstance(node, Repeat)
        and max(node.low, (node.high or 0) - node.low) > _WRITTEN_OUT
        and bool(printer.broad(node.node))
        for rule in grammar.rules.values()
        for node in walk(rule)
    )


_Key = tuple[Node, int, int | None, str]
"""A repetition: of what, at least and at most how often (below 0: a part of it), and the text behind it."""


class _Ebnf:
    def __init__(self, grammar: Grammar) -> None:
        self.lines: list[str] = []
        self._rules = grammar.rules
        self._names: dict[_Key, str] = {}

    def show(self, node: Node, *, tight: bool = False) -> str:
        """`tight`: an operator follows it, or it is part of a sequence, so it may need parentheses."""
        match node:
            case LiteralText():
                return '"' + "".join(_escape_ebnf(each) for each in node.value) + '"'
            case Chars():
                return "[" + "".join(_range_ebnf(low, high) for low, high in node.ranges) + "]"
            case Ref():
                return node.name
            case Repeat():
                return self._repeated(node)
            case Seq():
                if node == EMPTY:
                    return '""'
                shown = " ".join(self._parts(node))
            case Alt():
                if node == NOTHING:
                    raise ValueError("a rule that matches nothing can't be written")
                shown = " | ".join(self.show(part) for part in node.parts)
        return f"({shown})" if tight else shown

    def _parts(self, node: Seq) -> list[str]:
        """A sequence's parts. Text behind a repetition of many characters goes into its rules: tokens that close a string
        and go on are then judged ahead of time, too."""
        parts, shown = list(node.parts), []
        while parts:
            part = parts.pop(0)
            if isinstance(part, Repeat) and parts and isinstance(parts[0], LiteralText) and self.broad(part.node):
                shown.append(self._of_branches(part, self.broad(part.node), self.show(parts.pop(0))))
            else:
                shown.append(self.show(part, tight=True))
        return shown

    def _repeated(self, node: Repeat) -> str:
        branches = self.broad(node.node)
        if branches and not (isinstance(node.node, Chars) and (node.low, node.high) == (0, None)):
            return self._of_branches(node, branches, '""')
        inner = self.show(node.node, tight=True)
        if isinstance(node.node, Repeat):
            inner = f"({inner})"
        return f"{inner}{{{node.low},{'' if node.high is None else node.high}}}"

    def broad(self, node: Node) -> tuple[Node, ...]:
        """The alternatives of a node that is, above all, one of very many characters; empty: it is not."""
        if isinstance(node, Ref):
            node = self._rules[node.name]
        branches = node.parts if isinstance(node, Alt) else (node,)
        wide = any(
            isinstance(each, Chars) and sum(high - low + 1 for low, high in each.ranges) > _BROAD for each in branches
        )
        plain = not any(isinstance(inner, Ref) for each in branches for inner in walk(each))
        return branches if wide and plain and all(length_range(each)[0] > 0 for each in branches) else ()

    def _of_branches(self, node: Repeat, branches: tuple[Node, ...], then: str) -> str:
        """Repetition by recursion from the right, and `then` behind it: the first `low` by rules of their own, the rest
        without end or within a budget of characters. An escape counts as many as it is written with, so such texts stay
        within their bound."""
        low, high = node.low, node.high
        if high is None:
            tail = self._free(node.node, branches, then)
        elif high - low > _WRITTEN_OUT:
            free = self._free(node.node, branches, '""')
            budget = self._named((node.node, -1, high - low, ""), lambda _: free, f"[max_chars={high - low}]")
            tail = f"{budget} {then}"
        else:
            tail = then
            for left in range(1, high - low + 1):
                tail = self._chained((node.node, -2, left, then), branches, tail, may_end=then)
        for left in range(1, low + 1):
            tail = self._chained((node.node, left, high, then), branches, tail)
        return tail

    def _free(self, node: Node, branches: tuple[Node, ...], then: str) -> str:
        return self._named((node, 0, None, then), lambda name: self._then(branches, name, may_end=then))

    def _chained(self, key: _Key, branches: tuple[Node, ...], tail: str, *, may_end: str = "") -> str:
        return self._named(key, lambda _: self._then(branches, tail, may_end=may_end))

    def _then(self, branches: tuple[Node, ...], tail: str, *, may_end: str) -> str:
        shown = [f"{self.show(each, tight=True)} {tail}" for each in branches]
        return " | ".join([may_end, *shown] if may_end else shown)

    def _named(self, key: _Key, body: Callable[[str], str], attributes: str = "") -> str:
        """A rule made once for the same repetition."""
        if key not in self._names:
            name = self._names[key] = f"many_{len(self._names)}"
            self.lines.append(f"{name}{attributes} ::= {body(name)}")
        return self._names[key]


def _escape_ebnf(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return letter if letter.isascii() and letter.isprintable() else _by_number(ord(letter))


def _range_ebnf(low: int, high: int) -> str:
    return _class_ebnf(low) if low == high else f"{_class_ebnf(low)}-{_class_ebnf(high)}"


def _class_ebnf(point: int) -> str:
    letter = chr(point)
    return letter if letter.isascii() and letter.isalnum() else _by_number(point)


def _by_number(point: int) -> str:
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


# -- regular expressions --------------------------------------------------------------------------


def to_regex(node: Node) -> str:
    """A tree without references as a regular expression that Python and Rust both read."""
    return _regex(node, tight=False)


def _regex(node: Node, *, tight: bool) -> str:
    match node:
        case LiteralText():
            shown = "".join(_escape_regex(ord(each)) for each in node.value)
            return f"(?:{shown})" if tight and len(node.value) > 1 else shown
        case Chars():
            shown = "".join(
                _escape_regex(low) if low == high else f"{_escape_regex(low)}-{_escape_regex(high)}"
                for low, high in node.ranges
            )
            return f"[{shown}]"
        case Ref():
            raise ValueError("a reference has no regular expression")
        case Repeat():
            inner = _regex(node.node, tight=True)
            return (f"(?:{inner})" if isinstance(node.node, Repeat) else inner) + _times(node)
        case Seq():
            shown = "".join(
                f"(?:{_regex(part, tight=False)})" if isinstance(part, Alt) else _regex(part, tight=False)
                for part in node.parts
            )
        case Alt():
            if node == NOTHING:
                return "[^\\x00-\\U0010ffff]"
            shown = "|".join(_regex(part, tight=False) for part in node.parts)
    return f"(?:{shown})" if tight else shown


def _times(node: Repeat) -> str:
    match node.low, node.high:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case low, high:
            return f"{{{low},{'' if high is None else high}}}" if low != high else f"{{{low}}}"


def _escape_regex(point: int) -> str:
    letter = chr(point)
    if letter.isascii() and (letter.isalnum() or letter in " _"):
        return letter
    if point < 0x80:
        return f"\\x{point:02x}"
    return letter if letter.isprintable() else (f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}")


# -- Lark -----------------------------------------------------------------------------------------


def to_lark(grammar: Grammar, prefix: str = "r") -> list[str]:
    """The rules in llguidance's notation, named `prefix_name`: a rule without references becomes one terminal."""
    written = _inlined(grammar)
    return [f"{prefix}_{name}: {lark_of(rule, prefix)}" for name, rule in written.rules.items()]


_INLINE = 400


def _inlined(grammar: Grammar) -> Grammar:
    """The same grammar with small rules that don't lead back to themselves put where they are used: terminals are then as
    long as they can be, and the lexer sees whole strings and numbers."""
    done: dict[str, Node] = {}
    small: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in done or name in above:
            return
        for each in walk(grammar.rules[name]):
            if isinstance(each, Ref):
                visit(each.name, (*above, name))
        done[name] = node = _with(grammar.rules[name], done, small)
        nodes = list(walk(node))
        if not any(isinstance(each, Ref) for each in nodes) and len(nodes) <= _INLINE and name != grammar.root:
            small.add(name)

    visit(grammar.root, ())
    used = {each.name for node in done.values() for each in walk(node) if isinstance(each, Ref)}
    return Grammar({n: node for n, node in done.items() if n in used or n == grammar.root}, grammar.root)


def _with(node: Node, done: dict[str, Node], small: set[str]) -> Node:
    match node:
        case Ref():
            return done[node.name] if node.name in small else node
        case Seq():
            return seq(*(_with(part, done, small) for part in node.parts))
        case Alt():
            return alt(*(_with(part, done, small) for part in node.parts))
        case Repeat():
            return repeat(_with(node.node, done, small), node.low, node.high)
        case _:
            return node


def lark_of(node: Node, prefix: str, *, tight: bool = False) -> str:
    """One expression of a Lark rule."""
    if isinstance(node, LiteralText):
        return lark_text(node.value)
    if node == EMPTY:
        return '""'
    if isinstance(node, Ref):
        return f"{prefix}_{node.name}"
    if not any(isinstance(each, Ref) for each in walk(node)):
        return _terminal(node)
    match node:
        case Repeat():
            inner = lark_of(node.node, prefix, tight=True)
            if (node.low, node.high) in ((0, 1), (0, None), (1, None)):
                return inner + _times(node)
            return f"{inner}{{{node.low},{'' if node.high is None else node.high}}}"
        case Seq():
            shown = " ".join(lark_of(part, prefix, tight=True) for part in _grouped(node))
        case Alt():
            shown = " | ".join(lark_of(part, prefix) for part in node.parts)
        case _:
            raise AssertionError("texts, classes and references are done")
    return f"({shown})" if tight else shown


def _grouped(node: Seq) -> list[Node]:
    """Neighbours without references are one terminal, so that the lexer need not guess where one of them ends."""
    parts: list[Node] = []
    run: list[Node] = []
    for part in node.parts:
        if any(isinstance(each, Ref) for each in walk(part)):
            parts += [Seq(tuple(run)) if len(run) > 1 else run[0]] if run else []
            run = []
            parts.append(part)
        else:
            run.append(part)
    return parts + ([Seq(tuple(run)) if len(run) > 1 else run[0]] if run else [])


def _terminal(node: Node) -> str:
    """A terminal can't be empty; one that may be is optional instead."""
    shown = f"/{to_regex(node)}/"
    return f"({shown})?" if length_range(node)[0] == 0 else shown


def lark_text(value: str) -> str:
    escaped = "".join(
        "\\" + each if each in '"\\' else each if each.isprintable() else _control(each) for each in value
    )
    return f'"{escaped}"'


def _control(letter: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter) or f"\\u{ord(letter):04x}"
