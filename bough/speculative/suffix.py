"""Suffix decoding: of all places where the end of a text has been before, what followed most often is the draft.

What a suffix tree with counts answers is worked out from the places themselves: the occurrences of the matched tokens are
known, so the count of a continuation is the number of them that go on so. The share of occurrences is the estimate of how
likely a continuation is; a draft ends where the product of those shares falls below a limit, and its length is bound by
that of the match.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bough.core.step import I32, I64
from bough.speculative.acceptance import F64
from bough.speculative.guesses import NO_GUESS, Guess
from bough.speculative.matching import MatchPlaces, earlier_by_length, following
from bough.speculative.store import BORDER, ServedTexts

_SHARES = (0.0, 0.3, 0.5, 0.7, 0.9)
"""Estimates of a draft's first token, from which on it is of the next better kind."""
_PRIOR = (0.15, 0.35, 0.5, 0.65, 0.8)
_ELSEWHERE = len(_SHARES)
"""Kinds of guesses from other texts than the row's own come behind the others."""
_MOST_PLACES = 256
"""Occurrences that are counted, the newest ones."""


class Continued(NamedTuple):
    """A continuation, and the estimate that all of it up to each token is right."""

    tokens: I32
    likely: F64

    @property
    def score(self) -> float:
        """Tokens that it is expected to save."""
        return float(self.likely.sum())


class SuffixGuesser:
    """Takes the continuation that is expected to save most, over the lengths of the match."""

    def __init__(self, *, most: int, most_match: int, factor: float, least_likely: float, capacity_tokens: int) -> None:
        """A draft has at most `factor` tokens for each token of its match; it ends before one whose path is less likely
        than `least_likely`."""
        self.most = most
        self._most_match = most_match
        self._factor = factor
        self._least_likely = least_likely
        self.served = ServedTexts(capacity_tokens)

    @property
    def prior(self) -> F64:
        return np.array(_PRIOR + _PRIOR)

    def guess(self, text: I32, namespace: str) -> Guess:
        best, found = 0.0, NO_GUESS
        for length, pieces in self._own(text):
            made = self._continue(pieces, length)
            if made.score > best:
                best, found = made.score, Guess(made.tokens, _kind(float(made.likely[0])))
        length, pieces = self._elsewhere(text, namespace)
        if pieces:
            made = self._continue(pieces, length)
            if made.score > best:
                found = Guess(made.tokens, _ELSEWHERE + _kind(float(made.likely[0])))
        return found

    def add(self, text: I32, num_prompt: int, namespace: str) -> None:
        self.served.add(namespace, text[max(0, num_prompt - self._most_match) :])

    def _own(self, text: I32) -> Iterator[tuple[int, list[I32]]]:
        """By length of the match: what followed it earlier in the text."""
        for places in earlier_by_length(text, self._most_match):
            ends = places.ends[-_MOST_PLACES:]
            yield places.length, [following(text, end, self.most) for end in ends.tolist()]

    def _elsewhere(self, text: I32, namespace: str) -> tuple[int, list[I32]]:
        """What followed the longest match in texts that were served before, and its length."""
        store = self.served.of(namespace)
        if store is None:
            return 0, []
        matches: list[tuple[I32, MatchPlaces]] = list(store.find(text[-self._most_match :], self._most_match))
        length = max((places.length for _, places in matches), default=0)
        pieces: list[I32] = []
        for other, places in matches:
            if places.length == length:
                pieces += [other[end : end + self.most] for end in places.ends[-_MOST_PLACES:].tolist()]
        return length, pieces[:_MOST_PLACES]

    def _continue(self, pieces: list[I32], length: int) -> Continued:
        """Follows the most frequent token from place to place, as long as it is likely enough."""
        most = min(self.most, max(1, int(self._factor * length)))
        grid = np.full((len(pieces), most), BORDER, np.int32)
        for row, piece in zip(grid, pieces, strict=True):
            row[: min(most, len(piece))] = piece[:most]
        tokens: list[int] = []
        likely: list[float] = []
        rows: I64 = np.arange(len(pieces))
        chance = 1.0
        for column in range(most):
            here = grid[rows, column]
            values, counts = np.unique(here[here != BORDER], return_counts=True)
            if not len(values):
                break
            at = int(counts.argmax())
            chance *= float(counts[at]) / len(rows)
            if chance < self._least_likely:
                break
            tokens.append(int(values[at]))
            likely.append(chance)
            rows = rows[here == values[at]]
        return Continued(np.array(tokens, np.int32), np.array(likely))


def _kind(likely: float) -> int:
    return sum(likely >= share for share in _SHARES) - 1
