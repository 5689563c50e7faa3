"""Numbers the places in a grammar: texts with the same possible continuations lead to the same place.

A mask costs milliseconds if a backend has to try tokens one by one, and requests visit the same places repeatedly. A
place is the rest of the grammar after a text was read (its derivative, character by character). It is computed on the
first visit and identified by a number from then on.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import count

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
    repeat,
    seq,
    text,
    walk,
)

LOST = -1
"""An unnumbered place: the text has left the grammar, or the table is full."""
_MAX_PLACES = 16_384
_PLACE_BYTES = 1024
_MAX_NODES = 256
"""Maximum number of alternatives in the rest of a grammar; with more, computing its number would cost more than it
saves."""
_MAX_RULE = 4096
"""Maximum number of nodes of a rule; searching a larger one would take longer than a step."""
_MAX_WORK = 4_000_000
"""Maximum number of nodes visited for one grammar, in total: a few seconds."""

_numbers = count()


class Spot:
    """Facts about one place apart from its mask, computed on demand."""

    __slots__ = ("detours", "ends", "settled", "text")

    def __init__(self) -> None:
        self.text: str | None = None
        """Text that must come."""
        self.detours: tuple[tuple[int, bytes], ...] | None = None
        """Tokens after which text must come, with the bytes of both."""
        self.settled: dict[tuple[int, ...], list[int]] = {}
        """Number of these tokens, which spell the forced text, that leave no choice."""
        self.ends: dict[tuple[int, ...], bool] = {}
        """Whether nothing can follow these tokens."""


class States:
    """The places of one grammar. `longest` is the length of the longest token, in bytes: a mask looks no further."""

    def __init__(self, grammar: Grammar, longest: int) -> None:
        self.number = next(_numbers)
        """Its own, in this process."""

        self._rules = grammar.rules
        self._longest = longest
        self._nullable = _nullable_rules(grammar)
        self._bounds = _bounds(grammar)
        self._class_of: dict[str, int] = {}
        self._left: list[Node] = []
        """By place (even numbers): the rest of the grammar."""
        self._place_of: dict[Node, int] = {}
        self._next: list[dict[int | str, int]] = []
        """By place: the places after one more character of a class, and after texts that must come."""
        self._ways: list[dict[tuple[Node, ...], int]] = []
        """By place: the places after a character, by what it leaves of the parts in front."""
        self._literals: list[str] = []
        """By place: text that must come next, where it is written out."""
        self._parts: dict[tuple[int, bytes], int] = {}
        """Places within a character (odd numbers), by the place before it and its first bytes."""
        self._part_of: dict[int, tuple[int, bytes]] = {}
        """The inverse of `_parts`."""
        self._work = 0
        self._spots: dict[int, Spot] = {}
        self._rule_after: dict[tuple[str, int], Node] = {}
        self._view_of: dict[int, int] = {}
        self._views: dict[tuple[Node, bytes], int] = {}
        self.start = self._name(grammar.rules[grammar.root])

    def after(self, place: int, said: bytes) -> int:
        """The place after a token."""
        if place < 0:
            return LOST
        if place & 1:
            place, part = self._part_of[place]
            said = part + said
        try:
            letters, rest = said.decode(), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return LOST
            letters, rest = said[: error.start].decode(), said[error.start :]
        classes, following, literals = self._class_of, self._next, self._literals
        at, end = 0, len(letters)
        while at < end:
            literal = literals[place >> 1]
            if literal and (shared := _shared(literal, letters, at)) > 1:
                place, at = self._skip(place, literal[:shared]), at + shared
            else:
                letter = letters[at]
                kind = classes.get(letter)
                if kind is None:
                    kind = classes[letter] = bisect_right(self._bounds, ord(letter)) - 1
                found = following[place >> 1].get(kind)
                if found is None:
                    found = following[place >> 1][kind] = self._step(place, kind)
                place, at = found, at + 1
            if place < 0:
                return LOST
        return self._within(place, rest) if rest else place

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes."""
        return _PLACE_BYTES * (len(self._left) + len(self._parts))

    def spot(self, place: int) -> Spot:
        """The facts about a place; empty ones for an unnumbered place."""
        found = self._spots.get(place)
        if found is None:
            found = Spot()
            if place != LOST:
                self._spots[place] = found
        return found

    def view(self, place: int) -> int:
        """A number that places share where the same tokens are allowed next: counts beyond any token are alike."""
        found = self._view_of.get(place)
        if found is None:
            before, part = self._part_of.get(place, (place, b""))
            key = (self._near(self._left[before >> 1]), part)
            found = self._view_of[place] = self._views.setdefault(key, len(self._views))
        return found

    # -- places -----------------------------------------------------------------------------------

    def _name(self, node: Node) -> int:
        place = self._place_of.get(node)
        if place is None:
            if len(self._left) + len(self._parts) >= _MAX_PLACES or _is_large(node):
                return LOST
            place = self._place_of[node] = 2 * len(self._left)
            self._left.append(node)
            self._next.append({})
            self._ways.append({})
            first = node.parts[0] if isinstance(node, Seq) and node.parts else node
            self._literals.append(first.value if isinstance(first, LiteralText) else "")
        return place

    def _within(self, place: int, part: bytes) -> int:
        found = self._parts.get((place, part))
        if found is None:
            if len(self._left) + len(self._parts) >= _MAX_PLACES:
                return LOST
            found = self._parts[place, part] = 2 * len(self._parts) + 1
            self._part_of[found] = (place, part)
        return found

    def _step(self, place: int, kind: int) -> int:
        """The place after a character. Many classes do the same to what stands in front, and the rest need not be built."""
        left, point = self._left[place >> 1], self._bounds[kind]
        fronts: list[Node] = []
        for part in left.parts if isinstance(left, Seq) else (left,):
            fronts.append(self._after(part.node if isinstance(part, Repeat) else part, point))
            if not self._may_be_empty(part):
                break
        ways, key = self._ways[place >> 1], tuple(fronts)
        found = ways.get(key)
        if found is None and self._work > _MAX_WORK:
            return LOST
        if found is None:
            after = self._after(left, point)
            found = ways[key] = LOST if after == NOTHING else self._name(after)
        return found

    def _skip(self, place: int, literal: str) -> int:
        """The place after text that must come."""
        following = self._next[place >> 1]
        found = following.get(literal)
        if found is None:
            left = self._left[place >> 1]
            first, rest = (left.parts[0], left.parts[1:]) if isinstance(left, Seq) else (left, ())
            assert isinstance(first, LiteralText), "its text was noted"
            found = following[literal] = self._name(seq(text(first.value[len(literal) :]), *rest))
        return found

    def _after(self, node: Node, point: int) -> Node:
        """What may follow a character of the node's texts."""
        self._work += 1
        match node:
            case LiteralText():
                return text(node.value[1:]) if ord(node.value[0]) == point else NOTHING
            case Chars():
                return EMPTY if any(low <= point <= high for low, high in node.ranges) else NOTHING
            case Ref():
                found_after = self._rule_after.get((node.name, point))
                if found_after is None:
                    found_after = self._rule_after[node.name, point] = self._after(self._rules[node.name], point)
                return found_after
            case Repeat():
                fewer = repeat(node.node, max(node.low - 1, 0), None if node.high is None else node.high - 1)
                return seq(self._after(node.node, point), fewer)
            case Alt():
                return alt(*(self._after(part, point) for part in node.parts))
        found = []
        for at, part in enumerate(node.parts):
            after = self._after(part, point)
            if after != NOTHING:
                found.append(seq(after, *node.parts[at + 1 :]))
            if not self._may_be_empty(part):
                break
        return alt(*found)

    def _may_be_empty(self, node: Node) -> bool:
        return _may_be_empty(node, self._nullable)

    def _near(self, node: Node) -> Node:
        """The node with counts that no token can reach replaced by unlimited ones."""
        match node:
            case Repeat():
                high = None if node.high is None or node.high > self._longest else node.high
                return Repeat(self._near(node.node), min(node.low, self._longest + 1), high)
            case Seq():
                return Seq(tuple(self._near(part) for part in node.parts))
            case Alt():
                return Alt(tuple(self._near(part) for part in node.parts))
            case _:
                return node


def _shared(literal: str, letters: str, at: int) -> int:
    """Number of characters for which a text follows the literal: up to the end of either, or 0."""
    if letters.startswith(literal, at):
        return len(literal)
    left = len(letters) - at
    return left if left < len(literal) and literal.startswith(letters[at:]) else 0


def states_of(grammar: Grammar, longest: int) -> States | None:
    """None for left-recursive rules, which have infinitely many places before any character is read, and for rules that
    are too large."""
    if _begins_with_itself(grammar) or any(_is_large(rule, _MAX_RULE) for rule in grammar.rules.values()):
        return None
    return States(grammar, longest)


def _is_large(node: Node, most: int = _MAX_NODES) -> bool:
    return any(at >= most for at, _ in enumerate(walk(node)))


def _bounds(grammar: Grammar) -> list[int]:
    """First code points of the classes of characters that the grammar does not distinguish."""
    bounds = {0}
    for rule in grammar.rules.values():
        for node in walk(rule):
            if isinstance(node, Chars):
                bounds.update(point for low, high in node.ranges for point in (low, high + 1))
            elif isinstance(node, LiteralText):
                bounds.update(point for letter in node.value for point in (ord(letter), ord(letter) + 1))
    return sorted(bounds)


def _may_be_empty(node: Node, nullable: set[str]) -> bool:
    match node:
        case Ref():
            return node.name in nullable
        case Repeat():
            return node.low == 0 or _may_be_empty(node.node, nullable)
        case Seq():
            return all(_may_be_empty(part, nullable) for part in node.parts)
        case Alt():
            return any(_may_be_empty(part, nullable) for part in node.parts)
        case _:
            return False


def _nullable_rules(grammar: Grammar) -> set[str]:
    found: set[str] = set()
    while True:
        more = {name for name, rule in grammar.rules.items() if name not in found and _may_be_empty(rule, found)}
        if not more:
            return found
        found |= more


def _begins_with_itself(grammar: Grammar) -> bool:
    nullable = _nullable_rules(grammar)
    first = {name: _first_rules(rule, nullable) for name, rule in grammar.rules.items()}
    while True:  # solves rules that depend only on solved ones; the rest are recursive
        solved = {name for name, names in first.items() if not names & first.keys()}
        if not solved:
            return bool(first)
        for name in solved:
            del first[name]


def _first_rules(node: Node, nullable: set[str]) -> set[str]:
    match node:
        case Ref():
            return {node.name}
        case Repeat():
            return _first_rules(node.node, nullable)
        case Alt():
            return set().union(*(_first_rules(part, nullable) for part in node.parts))
        case Seq():
            found: set[str] = set()
            for part in node.parts:
                found |= _first_rules(part, nullable)
                if not _may_be_empty(part, nullable):
                    break
            return found
        case _:
            return set()
