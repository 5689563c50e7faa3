r"""Regular expressions over text that arrives in pieces, by an automaton of our own: the time per character is bounded.

Python's syntax, as far as a finite automaton can follow it: literals, classes, groups, alternatives, quantifiers, the flags
i, m, s, a and u, and the anchors ^ $ \A \Z \b \B. Look-around, back references, possessive quantifiers and atomic groups are
refused. What one character matches is asked of Python's `re`, so that classes and flags mean what they mean there.

A library would not do: `re` and `regex` try one way after another (for seconds, if a pattern is made for it) and can't be
stopped in between, and google-re2 does not say whether a match could still begin in the text so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

MAX_STATES: Final = 4096
"""Of all patterns of a request together. A repetition counts as often as it may repeat."""
_MAX_DEPTH: Final = 64
_UNITS_PER_CHARACTER: Final = 32
"""States that may be followed per character, on average: about 10 microseconds."""
_UNITS_AT_ONCE: Final = 4096
"""Beyond that, what a turn may take, however little text it brings: about a millisecond."""
_MOST_CHARACTERS: Final = 4096
"""Characters of which a set of patterns remembers what begins with them."""
_PLAIN: Final = frozenset(r".^$*+?{}[]\|()")


class BadPattern(ValueError):
    """A pattern that can't be read, or that no automaton can follow."""


class TooMuchWork(Exception):
    """The patterns exceed their budget of work on this text."""


class PatternMatch(NamedTuple):
    """A match, by places in the text that the scan was fed with."""

    start: int
    end: int
    pattern: str


def is_plain(pattern: str) -> bool:
    """Whether the pattern matches its own text only."""
    return _PLAIN.isdisjoint(pattern)


@lru_cache(maxsize=256)
def compile_patterns(patterns: tuple[str, ...]) -> Patterns:
    """An automaton for all patterns together. Raises `BadPattern`."""
    return Patterns(patterns)


# -- from text to states --------------------------------------------------------------------------

Holds = Callable[[str, str], bool]
"""An anchor: whether it holds between two characters; empty: the text begins or ends there."""


def _is_word(character: str, ascii_only: bool) -> bool:
    return bool(character) and (character == "_" or character.isalnum()) and (character.isascii() or not ascii_only)


class _Class:
    """The characters that one place of a pattern takes."""

    __slots__ = ("_known", "_matches", "source")

    def __init__(self, source: str, flags: re.RegexFlag) -> None:
        self.source = f"(?{_letters(flags)}:{source})" if flags else source
        self._matches = re.compile(source, flags).fullmatch
        self._known: dict[str, bool] = {}

    def takes(self, character: str) -> bool:
        known = self._known.get(character)
        if known is None:
            known = self._known[character] = self._matches(character) is not None
        return known


class _State:
    """One of: a character (`takes`), an anchor (`holds`), a fork (`ways`), or the end of a pattern (`ends`)."""

    __slots__ = ("ends", "holds", "leaves", "takes", "ways")

    def __init__(self) -> None:
        self.takes: _Class | None = None
        self.holds: Holds | None = None
        self.ends = ""
        self.ways: list[_State] = []
        """Where to go on: of a character or an anchor the only way."""
        self.leaves: tuple[_State, ...] = ()
        """What is reached through forks alone; filled by `_close`."""


class _Parser:
    """Recursive descent over one pattern that `re` has accepted. A part is built in front of what follows it."""

    def __init__(self, pattern: str, flags: re.RegexFlag, count: Callable[[], None]) -> None:
        """`flags`: of the whole pattern. `count` hears of every state that is made, and raises if there are too many."""
        self._text = pattern
        self._at = 0
        self._count = count
        self._depth = 0
        self._flags = flags

    def build(self, end: _State) -> _State:
        part = self._alternatives()
        if self._at < len(self._text):
            raise BadPattern("a parenthesis has no opening one")
        return part(end)

    # A part is a function from the state behind it to its own first state, so that a repetition can be built again.

    def _alternatives(self) -> Callable[[_State], _State]:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]

        def build(after: _State) -> _State:
            return self._fork([branch(after) for branch in branches])

        return build

    def _sequence(self) -> Callable[[_State], _State]:
        parts: list[Callable[[_State], _State]] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._quantified())

        def build(after: _State) -> _State:
            for part in reversed(parts):
                after = part(after)
            return after

        return build

    def _quantified(self) -> Callable[[_State], _State]:
        part = self._atom()
        bounds = self._quantifier()
        if bounds is None:
            return part
        low, high = bounds
        if self._take("+"):
            raise BadPattern("possessive quantifiers are not supported")
        self._take("?")  # which way is tried first makes no difference: the match that ends first is taken
        return lambda after: self._repeat(part, low, high, after)

    def _repeat(self, part: Callable[[_State], _State], low: int, high: int | None, after: _State) -> _State:
        if high is None:
            loop = self._fork([after])
            loop.ways.append(part(loop))
            after = loop
        else:
            end = after
            for _ in range(high - low):
                after = self._fork([end, part(after)])
        for _ in range(low):
            after = part(after)
        return after

    def _quantifier(self) -> tuple[int, int | None] | None:
        for letter, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(letter):
                return bounds
        found = re.compile(r"\{(\d*)(,?)(\d*)\}").match(self._text, self._at)
        if found is None or not (found[1] or found[2]):
            return None  # a brace as it is
        self._at = found.end()
        low = int(found[1] or 0)
        high = low if not found[2] else int(found[3]) if found[3] else None
        if max(low, high or 0) > MAX_STATES:
            raise BadPattern(f"a repetition of more than {MAX_STATES} is too large")
        return low, high

    def _atom(self) -> Callable[[_State], _State]:
        begin = self._at
        letter = self._next()
        if letter == "(":
            return self._group()
        if letter == "[":
            self._skip_class()
        elif letter == "^":
            return self._anchor(_starts_line if self._flags & re.M else _starts_text)
        elif letter == "$":
            return self._anchor(_ends_line if self._flags & re.M else _ends_text)
        elif letter == "\\":
            anchor = self._escape()
            if anchor is not None:
                return self._anchor(anchor)
        takes = _class(self._text[begin : self._at], self._flags)

        def build(after: _State) -> _State:
            state = self._made()
            state.takes, state.ways = takes, [after]
            return state

        return build

    def _anchor(self, holds: Holds) -> Callable[[_State], _State]:
        def build(after: _State) -> _State:
            state = self._made()
            state.holds, state.ways = holds, [after]
            return state

        return build

    def _group(self) -> Callable[[_State], _State]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise BadPattern(f"groups are nested more than {_MAX_DEPTH} deep")
        flags = self._flags
        if self._take("?") and self._group_kind():
            self._depth -= 1
            return lambda after: after
        part = self._alternatives()
        self._next()
        self._depth -= 1
        self._flags = flags
        return part

    def _group_kind(self) -> bool:
        """Reads what follows `(?`. Returns whether the group ends there: a comment, or flags of the whole pattern."""
        if self._text.startswith("P<", self._at):
            self._at = self._text.index(">", self._at) + 1
            return False
        for opening in ("=", "!", "<=", "<!"):
            if self._text.startswith(opening, self._at):
                raise BadPattern("look-ahead and look-behind are not supported")
        if self._take("#"):
            self._at = self._text.index(")", self._at) + 1
            return True
        if self._text.startswith(("P=", "("), self._at):
            raise BadPattern("back references are not supported")
        if self._take(">"):
            raise BadPattern("atomic groups are not supported")
        switched = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])").match(self._text, self._at)
        if switched is None:
            raise BadPattern("this kind of group is not supported")
        self._at = switched.end()
        if switched[3] == ")":
            return True
        self._flags = (self._flags | _flags(switched[1])) & ~_flags(switched[2] or "")
        return False

    def _escape(self) -> Holds | None:
        """Reads what follows a backslash; an anchor, if it is one."""
        letter = self._next()
        ascii_only = bool(self._flags & re.A)
        if letter == "A":
            return _starts_text
        if letter == "Z":
            return _is_over
        if letter in "bB":
            return lambda before, after: (
                (_is_word(before, ascii_only) != _is_word(after, ascii_only)) == (letter == "b")
            )
        if re.compile("[0-3][0-7]{2}").match(self._text, self._at - 1):
            self._at += 2
            return None
        if letter in "123456789":
            raise BadPattern("back references are not supported")
        digits = {"x": 2, "u": 4, "U": 8}.get(letter, 0)
        self._at += digits
        if letter == "N":
            self._at = self._text.index("}", self._at) + 1
        if letter == "0":
            self._at += self._text[self._at : self._at + 1] in tuple("01234567")
        return None

    def _skip_class(self) -> None:
        self._take("^")
        self._take("]")
        while (letter := self._next()) != "]":
            if letter == "\\":
                self._next()

    # -- reading and making ------------------------------------------------------------------------

    def _take(self, letter: str) -> bool:
        if self._text.startswith(letter, self._at):
            self._at += 1
            return True
        return False

    def _next(self) -> str:
        self._at += 1
        return self._text[self._at - 1]

    def _made(self) -> _State:
        self._count()
        return _State()

    def _fork(self, ways: list[_State]) -> _State:
        fork = self._made()
        fork.ways = ways
        return fork


def _starts_text(before: str, after: str) -> bool:
    return not before


def _starts_line(before: str, after: str) -> bool:
    return before in ("", "\n")


def _ends_line(before: str, after: str) -> bool:
    return after in ("", "\n")


def _is_over(before: str, after: str) -> bool:
    return not after


_ends_text = _is_over
"""In Python `$` holds before a line break at the very end, too; whether one is there is known only afterwards."""

_FLAGS: Final = {"i": re.I, "m": re.M, "s": re.S, "a": re.A, "u": re.U}


def _flags(letters: str) -> re.RegexFlag:
    found = re.NOFLAG
    for letter in letters:
        if letter not in _FLAGS:
            raise BadPattern(f"the flag {letter} is not supported")
        found |= _FLAGS[letter]
    return found & ~re.U


def _letters(flags: re.RegexFlag) -> str:
    return "".join(letter for letter, flag in _FLAGS.items() if flag & flags)


@lru_cache(maxsize=4096)
def _class(source: str, flags: re.RegexFlag) -> _Class:
    return _Class(source, flags & (re.I | re.S | re.A))


def _close(state: _State) -> tuple[_State, ...]:
    """What is reached from a state through forks alone."""
    if not state.leaves:
        seen: dict[int, None] = {}
        leaves: list[_State] = []
        left = [state]
        while left:
            each = left.pop()
            if id(each) in seen:
                continue
            seen[id(each)] = None
            if each.takes is not None or each.holds is not None or each.ends:
                leaves.append(each)
            else:
                left += each.ways
        state.leaves = tuple(leaves)
    return state.leaves


# -- following text -------------------------------------------------------------------------------


class Patterns:
    """Several patterns as one automaton, shared by every text that is watched for them.

    All of its scans together may follow a bounded number of states in one turn (`begin_turn`), so that a client with many
    texts and ambiguous patterns does not delay others.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        """Raises `BadPattern`."""
        self.num_states = 0
        ways: list[_State] = []
        for pattern in patterns:
            try:
                flags = re.RegexFlag(re.compile(pattern).flags)
                if flags & re.X:
                    raise BadPattern("the flag x is not supported")
                end = _State()
                end.ends = pattern
                ways.append(_Parser(pattern, flags & ~re.U, self._count).build(end))
            except BadPattern as error:
                raise BadPattern(f"{pattern!r}: {error}") from None
            except (re.error, OverflowError, RecursionError, ValueError, IndexError) as error:
                raise BadPattern(f"{pattern!r}: {error or 'it is nested too deeply'}") from error
        start = _State()
        start.ways = ways
        self._first = _close(start)
        self.first_anchors = tuple(state for state in self._first if state.holds is not None)
        self.begins = self._first_characters()
        """What a match may begin with; None: it may be anything."""
        self._starts: dict[str, tuple[_State, ...]] = {}
        self._turn = 0
        self._units = 0
        self._characters = 0

    def _count(self) -> None:
        self.num_states += 1
        if self.num_states > MAX_STATES:
            raise BadPattern(f"the patterns have more than {MAX_STATES} states, counting each repetition")

    def starts(self, character: str) -> tuple[_State, ...]:
        """Where a match is that begins with this character, no anchor before it."""
        found = self._starts.get(character)
        if found is None:
            reached = [_close(state.ways[0]) for state in self._first if state.takes and state.takes.takes(character)]
            found = tuple(dict.fromkeys(leaf for leaves in reached for leaf in leaves))
            if len(self._starts) < _MOST_CHARACTERS:
                self._starts[character] = found
        return found

    def _first_characters(self) -> re.Pattern[str] | None:
        seen: set[int] = set()
        classes: dict[str, None] = {}
        left = list(self._first)
        while left:
            state = left.pop()
            if state.ends:
                return None
            if state.takes is not None:
                classes[state.takes.source] = None
            elif id(state) not in seen:
                seen.add(id(state))
                left += _close(state.ways[0])
        return re.compile("|".join(classes)) if classes else None

    def begin_turn(self, turn: int) -> None:
        """What was followed before `turn` no longer counts."""
        if turn != self._turn:
            self._turn, self._units, self._characters = turn, 0, 0

    def spend(self, units: int, characters: int) -> None:
        """Raises `TooMuchWork` if all texts together have taken too much in this turn."""
        self._units += units
        self._characters += characters
        if self._units > _UNITS_AT_ONCE + _UNITS_PER_CHARACTER * self._characters:
            raise TooMuchWork

    def scan(self) -> Scan:
        """A new text."""
        return Scan(self)


_Live = dict[_State, int]
"""States that are waited in, with the place where the earliest match that waits there began."""


class Scan:
    """One text. The match that ends first is found, however the text is cut; of those that are found with the same
    character, the longest. A pattern that ends with an anchor is found with the character behind it, which decides about
    the anchor."""

    __slots__ = ("_before", "_live", "_patterns", "at")

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._live: _Live = {}
        self._before = ""
        """The last character fed."""
        self.at = 0
        """Characters fed so far."""

    def feed(self, text: str) -> PatternMatch | None:
        """The first match to end within `text`, or right before it; the scan is over then. Raises `TooMuchWork`."""
        patterns, base, place, size = self._patterns, self.at, 0, len(text)
        begins = patterns.begins
        while place < size:
            if not self._live and begins is not None:
                found = begins.search(text, place)
                skipped = (size if found is None else found.start()) - place
                patterns.spend(0, skipped)
                place += skipped
                if found is None:
                    break
            match = self._step(text[place - 1] if place else self._before, text[place], base + place)
            if match is not None:
                return match
            place += 1
        self.at = base + size
        self._before = text[-1:] or self._before
        return None

    def finish(self) -> PatternMatch | None:
        """The match that the end of the text completes, by an anchor that holds there."""
        return self._anchored(dict(self._live), self._before, "", self.at)

    def hold_from(self, reach: int) -> int:
        """Where the earliest match could begin that is not complete yet; at most `reach` characters back."""
        live = self._live
        if not live:
            return self.at
        earliest = min(live.values())
        if earliest < self.at - reach:
            earliest = self.at - reach
            for state, start in live.items():
                live[state] = max(start, earliest)
        return earliest

    def _step(self, before: str, character: str, at: int) -> PatternMatch | None:
        patterns, waiting = self._patterns, self._live
        if patterns.first_anchors or any(state.holds is not None for state in waiting):
            waiting = dict.fromkeys(patterns.first_anchors, at) | waiting
            match = self._anchored(waiting, before, character, at)
            if match is not None:
                return match
        live: _Live = {}
        units = len(waiting)
        for state, start in waiting.items():
            if state.takes is not None and state.takes.takes(character):
                leaves = _close(state.ways[0])
                units += len(leaves)
                for leaf in leaves:
                    if live.get(leaf, start) >= start:
                        live[leaf] = start
        for leaf in patterns.starts(character):
            live.setdefault(leaf, at)
        self._live = live
        patterns.spend(units + len(live), 1)
        return _ended(live, at + 1)

    def _anchored(self, waiting: _Live, before: str, after: str, at: int) -> PatternMatch | None:
        """Goes through the anchors that hold here, which adds to `waiting`. A match, if that ends one."""
        left = [state for state in waiting if state.holds is not None]
        while left:
            state = left.pop()
            assert state.holds is not None
            if state.holds(before, after):
                start = waiting[state]
                for leaf in _close(state.ways[0]):
                    if leaf not in waiting or start < waiting[leaf]:
                        waiting[leaf] = start
                        if leaf.holds is not None:
                            left.append(leaf)
        return _ended(waiting, at)


def _ended(live: _Live, at: int) -> PatternMatch | None:
    """The longest match that ends here; none that is empty."""
    ended = [(start, state.ends) for state, start in live.items() if state.ends and start < at]
    if not ended:
        return None
    start, pattern = min(ended)
    return PatternMatch(start, at, pattern)
