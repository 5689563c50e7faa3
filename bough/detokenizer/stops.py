"""Stop strings and stop patterns in text that arrives in pieces.

Text leaves as soon as it can't be part of a stop any more. Stop strings run through one Aho-Corasick automaton, patterns
through one of their own (`bough.parsers.stop_patterns`): linear in the text, and the same verdict however the text is cut.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from bough.core.errors import InvalidRequest
from bough.parsers.stop_patterns import Match, TooMuchWork, compile_patterns, is_plain

_PATTERN_REACH: Final = 4096
"""Characters that are held back for a match at most."""


class Found(NamedTuple):
    """What a piece of text brought."""

    text: str
    """Text that may leave."""
    matched: str | None = None
    """The stop string or pattern that ended the answer."""


class Automaton:
    """All stop strings at once. State 0 is the start; a state's depth is how many characters could begin a stop string."""

    __slots__ = ("_steps", "_suffix", "depth", "first", "matched")

    def __init__(self, words: tuple[str, ...]) -> None:
        self.first = frozenset(word[0] for word in words)
        self.depth = [0]
        self.matched: list[str | None] = [None]
        """The longest stop string that ends in each state."""
        self._steps: dict[tuple[int, str], int] = {}
        self._suffix = [0]
        """The state of the longest proper suffix that begins a stop string."""
        for word in words:
            self._add(word)
        self._link()

    def _add(self, word: str) -> None:
        state = 0
        for character in word:
            following = self._steps.get((state, character))
            if following is None:
                following = len(self.depth)
                self._steps[state, character] = following
                self.depth.append(self.depth[state] + 1)
                self.matched.append(None)
                self._suffix.append(0)
            state = following
        self.matched[state] = word

    def _link(self) -> None:
        """Finds the suffixes, shorter strings first."""
        for (state, character), following in sorted(self._steps.items(), key=lambda step: self.depth[step[1]]):
            if state:
                self._suffix[following] = self.step(self._suffix[state], character)
            if self.matched[following] is None:
                self.matched[following] = self.matched[self._suffix[following]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        steps, suffix = self._steps, self._suffix
        following = steps.get((state, character))
        while following is None and state:
            state = suffix[state]
            following = steps.get((state, character))
        return following or 0


@lru_cache(maxsize=64)
def _automaton(words: tuple[str, ...]) -> Automaton:
    return Automaton(words)


class StopStrings:
    """Watches one answer for stop strings. The first one to be complete wins; of those that end together, the longest."""

    __slots__ = ("_automaton", "_held", "_keep", "_state")

    def __init__(self, words: tuple[str, ...], *, keep_match: bool = False) -> None:
        self._automaton = _automaton(words)
        self._keep = keep_match
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> Found:
        automaton = self._automaton
        state = self._state
        if state == 0 and automaton.first.isdisjoint(text):
            return Found(text)
        matched = automaton.matched
        for place, character in enumerate(text):
            state = automaton.step(state, character)
            word = matched[state]
            if word is not None:
                seen = self._held + text[: place + 1]
                self._held = ""
                return Found(seen if self._keep else seen[: len(seen) - len(word)], word)
        self._state = state
        seen = self._held + text
        cut = len(seen) - automaton.depth[state]
        self._held = seen[cut:]
        return Found(seen[:cut])

    def finish(self) -> str:
        """The text held back, once no more comes."""
        held, self._held = self._held, ""
        return held


class StopPatterns:
    """Watches one answer for regular expressions. A match reaches over at most `_PATTERN_REACH` characters: if it began
    earlier, what is left of it is cut off."""

    def __init__(self, patterns: tuple[str, ...], *, keep_match: bool = False) -> None:
        self._patterns = compile_patterns(patterns)
        self._scan = self._patterns.scan()
        self._keep = keep_match
        self._held = ""
        """Text that may be part of a match..."""
        self._begin = 0
        """...and where it begins in the answer."""
        self.match_chars = 0
        """Length of the match, once there is one."""

    def begin_turn(self, turn: int) -> None:
        """What the patterns took before `turn` no longer counts."""
        self._patterns.begin_turn(turn)

    def feed(self, text: str) -> Found:
        """Raises `InvalidRequest` when the patterns take too long."""
        self._held += text
        try:
            match = self._scan.feed(text)
        except TooMuchWork:
            raise _too_slow() from None
        if match is not None:
            return self._ended(match)
        hold = self._scan.hold_from(_PATTERN_REACH) - self._begin
        released, self._held = self._held[:hold], self._held[hold:]
        self._begin += hold
        return Found(released)

    def finish(self) -> Found:
        """What is left, once no more comes; perhaps its end completes a match."""
        match = self._scan.finish()
        if match is not None:
            return self._ended(match)
        held, self._held = self._held, ""
        return Found(held)

    def _ended(self, match: Match) -> Found:
        self.match_chars = match.end - match.start
        cut = (match.end if self._keep else match.start) - self._begin
        found, self._held = self._held[:cut], ""
        return Found(found, match.pattern)


def _too_slow() -> InvalidRequest:
    return InvalidRequest(
        what="stop_regex takes too long on this answer",
        why="its patterns follow too many ways at once",
        fix="send simpler patterns: fewer and shorter repetitions of what may be anything",
        param="stop_regex",
    )


class Stops:
    """Strings and patterns together; patterns that are plain text count as strings. What is complete first wins; of those
    that end together, what began first."""

    def __init__(self, words: tuple[str, ...], patterns: tuple[str, ...], *, keep_match: bool = False) -> None:
        plain = tuple(filter(is_plain, patterns))
        words = tuple(dict.fromkeys([*words, *plain]))
        rest = tuple(pattern for pattern in patterns if pattern not in plain)
        both = bool(words and rest)
        self._keep = keep_match
        self._strings = StopStrings(words, keep_match=keep_match or both) if words else None
        self._patterns = StopPatterns(rest, keep_match=keep_match or both) if rest else None
        self._held = ""
        """With both: text that one of them, or neither, has let pass."""
        self._by_strings = self._by_patterns = 0
        """How much of it each has let pass."""

    def begin_turn(self, turn: int) -> None:
        """What the patterns took before `turn` no longer counts."""
        if self._patterns is not None:
            self._patterns.begin_turn(turn)

    def feed(self, text: str) -> Found:
        if self._patterns is None:
            return self._strings.feed(text) if self._strings is not None else Found(text)
        if self._strings is None:
            return self._patterns.feed(text)
        self._held += text
        return self._earlier(self._strings.feed(text), self._patterns.feed(text), self._patterns)

    def _earlier(self, word: Found, pattern: Found, patterns: StopPatterns) -> Found:
        """What both have found, as one: the stop that ends first, or what neither holds back."""
        self._by_strings += len(word.text)
        self._by_patterns += len(pattern.text)
        ends = []
        if word.matched is not None:
            ends.append((self._by_strings, self._by_strings - len(word.matched), word.matched))
        if pattern.matched is not None:
            ends.append((self._by_patterns, self._by_patterns - patterns.match_chars, pattern.matched))
        if ends:
            end, start, matched = min(ends)
            return Found(self._held[: end if self._keep else start], matched)
        free = min(self._by_strings, self._by_patterns)
        self._by_strings -= free
        self._by_patterns -= free
        passed, self._held = self._held[:free], self._held[free:]
        return Found(passed)

    def finish(self) -> Found:
        """What is left; its end may complete a pattern."""
        if self._patterns is None:
            return Found(self._strings.finish() if self._strings is not None else "")
        if self._strings is None:
            return self._patterns.finish()
        return self._earlier(Found(self._strings.finish()), self._patterns.finish(), self._patterns)
