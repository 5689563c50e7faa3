"""Stop strings and stop patterns in text that arrives in pieces.

Text is released as soon as it cannot be part of a stop any more. Stop strings are found by one Aho-Corasick automaton,
patterns by an automaton in `bough.parsers.stop_patterns`: both are linear in the text and give the same result however
the text is cut into pieces.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from bough.core.errors import InvalidRequest
from bough.parsers.stop_patterns import PatternMatch, TooMuchWork, compile_patterns, is_plain

_PATTERN_REACH: Final = 4096
"""Maximum number of characters held back for a possible match of a pattern."""


class Found(NamedTuple):
    """The result of one piece of text."""

    text: str
    """Text that can be released."""
    matched: str | None = None
    """The stop string or pattern that ended the answer."""


class StopAutomaton:
    """Aho-Corasick automaton of all stop strings. State 0 is the start. The depth of a state is the number of last
    characters that may be the beginning of a stop string."""

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
        """Computes the suffix links, shorter strings first."""
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
def _automaton(words: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(words)


class StopStrings:
    """Searches one answer for stop strings. The first complete one ends the answer; of several that end at the same
    character, the longest."""

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
        """The text that was held back; called at the end of the answer."""
        held, self._held = self._held, ""
        return held


class StopPatterns:
    """Searches one answer for regular expressions. A match has at most `_PATTERN_REACH` characters: of a longer one
    only the last characters are removed from the text."""

    def __init__(self, patterns: tuple[str, ...], *, keep_match: bool = False) -> None:
        self._patterns = compile_patterns(patterns)
        self._scan = self._patterns.scan()
        self._keep = keep_match
        self._held = ""
        """Text that may be part of a match."""
        self._begin = 0
        """Position of `_held` in the answer, in characters."""
        self.match_chars = 0
        """Length of the match, once there is one."""

    def begin_turn(self, turn: int) -> None:
        """What the patterns took before `turn` no longer counts."""
        self._patterns.begin_turn(turn)

    def feed(self, text: str) -> Found:
        """Adds text. Raises `InvalidRequest` if the patterns exceed their budget of work."""
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
        """The text that was held back; called at the end of the answer, which may complete a match."""
        match = self._scan.finish()
        if match is not None:
            return self._ended(match)
        held, self._held = self._held, ""
        return Found(held)

    def _ended(self, match: PatternMatch) -> Found:
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
    """Stop strings and patterns of one answer. Patterns without special characters are treated as strings. The first
    complete match ends the answer; of several that end at the same character, the one that began first."""

    def __init__(self, words: tuple[str, ...], patterns: tuple[str, ...], *, keep_match: bool = False) -> None:
        plain = tuple(filter(is_plain, patterns))
        words = tuple(dict.fromkeys([*words, *plain]))
        rest = tuple(pattern for pattern in patterns if pattern not in plain)
        both = bool(words and rest)
        self._keep = keep_match
        self._strings = StopStrings(words, keep_match=keep_match or both) if words else None
        self._patterns = StopPatterns(rest, keep_match=keep_match or both) if rest else None
        self._held = ""
        """If there are both strings and patterns: text that at least one of them still holds back."""
        self._by_strings = self._by_patterns = 0
        """Number of characters of `_held` that each has released."""

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
        """Combines the results of both: the stop that ends first, or else the text that neither holds back."""
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
        """The text that was held back; the end of the answer may complete a pattern."""
        if self._patterns is None:
            return Found(self._strings.finish() if self._strings is not None else "")
        if self._strings is None:
            return self._patterns.finish()
        return self._earlier(Found(self._strings.finish()), self._patterns.finish(), self._patterns)
