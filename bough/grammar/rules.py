"""Grammars as trees: every source (schema, pattern, choice) becomes a tree, which is then written in the notation of a
backend.

Nodes are immutable. `NOTHING` matches no text at all, `EMPTY` the empty text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LiteralText:
    """Exactly this text, at least one character."""

    value: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of sorted, disjoint ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    node: Node
    low: int
    high: int | None
    """None: no limit."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A rule, by name."""

    name: str


Node = LiteralText | Chars | Seq | Alt | Repeat | Ref
EMPTY = Seq(())
NOTHING = Alt(())


@dataclass(slots=True)
class Grammar:
    """Named rules; the whole text is `root`. Names are lower-case letters, digits and underscores."""

    rules: dict[str, Node] = field(default_factory=dict)
    root: str = "root"


# -- building -------------------------------------------------------------------------------------


def text(value: str) -> Node:
    return LiteralText(value) if value else EMPTY


def seq(*parts: Node) -> Node:
    """Parts one after another; neighbouring texts become one."""
    flat: list[Node] = []
    for part in parts:
        for each in part.parts if isinstance(part, Seq) else (part,):
            if isinstance(each, LiteralText) and flat and isinstance(flat[-1], LiteralText):
                flat[-1] = LiteralText(flat[-1].value + each.value)
            else:
                flat.append(each)
    if any(each == NOTHING for each in flat):
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(*parts: Node) -> Node:
    """One of the parts; equal ones count once."""
    flat: dict[Node, None] = {}
    for part in parts:
        for each in part.parts if isinstance(part, Alt) else (part,):
            flat[each] = None
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def repeat(node: Node, low: int, high: int | None) -> Node:
    if high == 0 or node == EMPTY:
        return EMPTY
    if node == NOTHING:
        return NOTHING if low else EMPTY
    if isinstance(node, Repeat) and (low, high) == (0, 1) and node.low <= 1:
        return Repeat(node.node, 0, node.high)
    return node if low == high == 1 else Repeat(node, low, high)


def optional(node: Node) -> Node:
    return repeat(node, 0, 1)


def chars(ranges: Iterable[tuple[int, int]]) -> Node:
    """A class of characters out of any ranges. Surrogates are never among them."""
    merged = without(merge_ranges(ranges), (_SURROGATES,))
    return Chars(merged) if merged else NOTHING


def one_of(letters: str) -> Node:
    return chars((ord(each), ord(each)) for each in letters)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """`ranges` less `taken`; both sorted and disjoint."""
    left: list[tuple[int, int]] = []
    for first, last in ranges:
        low = first
        for out_low, out_high in taken:
            if out_high < low or out_low > last:
                continue
            if out_low > low:
                left.append((low, out_low - 1))
            low = out_high + 1
        if low <= last:
            left.append((low, last))
    return tuple(left)


def complement(ranges: Ranges) -> Ranges:
    return without(((0, MAX_CODE_POINT),), ranges)


# -- looking --------------------------------------------------------------------------------------


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Seq() | Alt():
            return node.parts
        case Repeat():
            return (node.node,)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it, without following references."""
    stack = [node]
    while stack:
        each = stack.pop()
        yield each
        stack.extend(children(each))


def num_states(grammar: Grammar) -> int:
    """Size of the automaton if every repetition were expanded; it limits malicious grammars."""
    return sum(_states(rule) for rule in grammar.rules.values())


def _states(node: Node) -> int:
    match node:
        case LiteralText():
            return len(node.value)
        case Chars() | Ref():
            return 1
        case Repeat():
            times = node.low + 1 if node.high is None else node.high
            # A repeated rule is counted, not copied.
            return 1 + _states(node.node) * (1 if isinstance(node.node, Ref) else max(times, 1))
        case _:
            return 1 + sum(_states(part) for part in node.parts)


def length_range(node: Node) -> tuple[int, int | None]:
    """Minimum and maximum number of characters that the node matches; None: no limit. The node must not contain
    references."""
    match node:
        case LiteralText():
            return len(node.value), len(node.value)
        case Chars():
            return 1, 1
        case Ref():
            raise ValueError("a reference has no length")
        case Repeat():
            low, high = length_range(node.node)
            if high == 0:
                return 0, 0
            return low * node.low, None if high is None or node.high is None else high * node.high
    ranges = [length_range(part) for part in node.parts]
    highs = [high for _, high in ranges if high is not None]
    unlimited = len(highs) < len(ranges)
    if isinstance(node, Seq):
        return sum(low for low, _ in ranges), None if unlimited else sum(highs)
    return min((low for low, _ in ranges), default=0), None if unlimited else max(highs, default=0)


def prefixed(node: Node, prefix: str) -> Node:
    """The node with another prefix of rule names."""
    match node:
        case Ref():
            return Ref(prefix + node.name)
        case Seq():
            return Seq(tuple(prefixed(part, prefix) for part in node.parts))
        case Alt():
            return Alt(tuple(prefixed(part, prefix) for part in node.parts))
        case Repeat():
            return Repeat(prefixed(node.node, prefix), node.low, node.high)
        case _:
            return node


# -- ends that can't be reached ---------------------------------------------------------------------


def prune(grammar: Grammar) -> Grammar | None:
    """Removes branches that can never end, and unused rules. Returns None if no text fits the grammar."""
    finite: set[str] = set()
    while True:
        more = {n for n, rule in grammar.rules.items() if n not in finite and _ends(rule, finite)}
        if not more:
            break
        finite |= more
    if grammar.root not in finite:
        return None
    kept: dict[str, Node] = {}
    wanted = [grammar.root]
    while wanted:
        name = wanted.pop()
        if name not in kept:
            kept[name] = rule = _cut(grammar.rules[name], finite)
            wanted.extend(each.name for each in walk(rule) if isinstance(each, Ref))
    order = [name for name in grammar.rules if name in kept]
    return Grammar({name: kept[name] for name in order}, grammar.root)


def _ends(node: Node, finite: set[str]) -> bool:
    match node:
        case Ref():
            return node.name in finite
        case Seq():
            return all(_ends(part, finite) for part in node.parts)
        case Alt():
            return any(_ends(part, finite) for part in node.parts)
        case Repeat():
            return node.low == 0 or _ends(node.node, finite)
        case _:
            return True


def _cut(node: Node, finite: set[str]) -> Node:
    match node:
        case Seq():
            return seq(*(_cut(part, finite) for part in node.parts))
        case Alt():
            return alt(*(_cut(part, finite) for part in node.parts if _ends(part, finite)))
        case Repeat():
            if not _ends(node.node, finite):
                return EMPTY
            return repeat(_cut(node.node, finite), node.low, node.high)
        case _:
            return node
