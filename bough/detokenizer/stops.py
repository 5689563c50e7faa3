"""Stop strings and stop patterns in text that arrives in pieces.

Text leaves as soon as it can't be part of a stop any more. Stop strings run through one Aho-Corasick automaton: linear in
the text, whatever the strings, and the same verdict however the text is cut. Patterns are bounded in time and reach.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Final, NamedTuple

import regex

from bough.core.errors import InvalidRequest

_PATTERN_REACH: Final = 4096
"""Characters that a pattern's match may span."""
_PATTERN_CONTEXT: Final = 256
"""Characters before the match that look-behinds can see."""
_SEARCH_TIMEOUT_S: Final = 0.05
_PATTERN_BUDGET_S: Final = 2.0
"""Time on a processor that one answer's patterns may take in all; the one above is such, too."""


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
    """Watches one answer for regular expressions. A match reaches over at most `_PATTERN_REACH` characters."""

    def __init__(self, patterns: tuple[str, ...], *, keep_match: bool = False) -> None:
        self._patterns = [_pattern(pattern) for pattern in patterns]
        self._keep = keep_match
        self._seen = ""
        """Context that is out already, then text held back."""
        self._sent = 0
        self._spent_s = 0.0
        self.match_chars = 0
        """Length of the match, once there is one."""

    def feed(self, text: str) -> Found:
        """Raises `InvalidRequest` when the patterns take too long."""
        self._seen += text
        started_s = time.thread_time()
        try:
            best = self._first_match()
            hold = self._first_possible() if best is None else 0
        except TimeoutError:
            raise _too_slow() from None
        self._spent_s += time.thread_time() - started_s
        if self._spent_s > _PATTERN_BUDGET_S:
            raise _too_slow()
        if best is not None:
            start, end, source = best
            self.match_chars = end - start
            found = self._seen[self._sent : end if self._keep else start]
            self._seen, self._sent = "", 0
            return Found(found, source)
        hold = max(hold, len(self._seen) - _PATTERN_REACH, self._sent)
        released = self._seen[self._sent : hold]
        dropped = max(0, hold - _PATTERN_CONTEXT)
        self._seen, self._sent = self._seen[dropped:], hold - dropped
        return Found(released)

    def _first_match(self) -> tuple[int, int, str] | None:
        """The match that ends first, if any: start, end, pattern."""
        best: tuple[int, int, str] | None = None
        for pattern in self._patterns:
            match = pattern.search(self._seen, pos=self._sent, timeout=_SEARCH_TIMEOUT_S)
            if match is not None and match.end() > match.start() and (best is None or match.end() < best[1]):
                best = (match.start(), match.end(), pattern.pattern)
        return best

    def _first_possible(self) -> int:
        """Where the first match could begin that is not complete yet."""
        hold = len(self._seen)
        for pattern in self._patterns:
            match = pattern.search(self._seen, pos=self._sent, partial=True, timeout=_SEARCH_TIMEOUT_S)
            if match is not None and match.partial:
                hold = min(hold, match.start())
        return hold

    def finish(self) -> str:
        held, self._seen, self._sent = self._seen[self._sent :], "", 0
        return held


@lru_cache(maxsize=256)
def _pattern(source: str) -> regex.Pattern[str]:
    return regex.compile(source)


def _too_slow() -> InvalidRequest:
    return InvalidRequest(
        what="stop_regex takes too long on this answer",
        why="its patterns try too many ways to match",
        fix="send simpler patterns",
        param="stop_regex",
    )


class Stops:
    """Strings and patterns together; patterns that are plain text count as strings. What is complete first wins; of those
    that end together, what began first."""

    def __init__(self, words: tuple[str, ...], patterns: tuple[str, ...], *, keep_match: bool = False) -> None:
        plain = tuple(pattern for pattern in patterns if regex.escape(pattern, special_only=True) == pattern)
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

    def feed(self, text: str) -> Found:
        if self._patterns is None:
            return self._strings.feed(text) if self._strings is not None else Found(text)
        if self._strings is None:
            return self._patterns.feed(text)
        word, pattern = self._strings.feed(text), self._patterns.feed(text)
        self._held += text
        self._by_strings += len(word.text)
        self._by_patterns += len(pattern.text)
        ends = []
        if word.matched is not None:
            ends.append((self._by_strings, self._by_strings - len(word.matched), word.matched))
        if pattern.matched is not None:
            ends.append((self._by_patterns, self._by_patterns - self._patterns.match_chars, pattern.matched))
        if ends:
            end, start, matched = min(ends)
            return Found(self._held[: end if self._keep else start], matched)
        free = min(self._by_strings, self._by_patterns)
        self._by_strings -= free
        self._by_patterns -= free
        passed, self._held = self._held[:free], self._held[free:]
        return Found(passed)

    def finish(self) -> Found:
        """What is left."""
        if self._strings is not None and self._patterns is not None:
            return Found(self._held)
        scan = self._strings or self._patterns
        return Found(scan.finish() if scan is not None else "")
