"""N-gram drafts: the end of a text is looked for earlier in it, in what was served before and in an operator's corpora; what
followed there is the draft."""

from __future__ import annotations

import numpy as np

from bough.core.step import I32
from bough.speculative.acceptance import F64
from bough.speculative.corpora import Corpora
from bough.speculative.guesses import NO_GUESS, Guess
from bough.speculative.matching import earlier, following
from bough.speculative.store import ServedTexts, TokenStore

_LENGTHS = (1, 2, 3, 4, 6, 9, 14, 24)
"""Tokens that agree, from which on a guess is of the next better kind."""
_PRIOR = (0.1, 0.15, 0.25, 0.35, 0.5, 0.6, 0.75, 0.8)
_ELSEWHERE = len(_LENGTHS)
"""Kinds of guesses from other texts than the row's own come behind the others."""
_OWN_ENOUGH = 6
"""Tokens of its own text that agree, from which on others are not asked."""


class NgramGuesser:
    """Takes the longest match, and of several the newest."""

    def __init__(
        self, *, most: int, least_match: int, most_match: int, capacity_tokens: int, corpora: Corpora | None = None
    ) -> None:
        self.most = most
        self._least_match = least_match
        self._most_match = most_match
        self.served = ServedTexts(capacity_tokens)
        self.corpora = corpora if corpora is not None else Corpora(0)

    @property
    def prior(self) -> F64:
        return np.array(_PRIOR + _PRIOR)

    def guess(self, text: I32, namespace: str) -> Guess:
        own = earlier(text, self._most_match)
        best, found = own.length if len(own.ends) else 0, NO_GUESS
        if best >= self._least_match:
            tokens = following(text, int(own.ends[-1]), self.most)
            found = Guess(tokens, _kind(best))
        if best < _OWN_ENOUGH:
            for store in self._stores(namespace):
                for other, places in store.find(text[-self._most_match :], self._most_match):
                    if places.length > best and places.length >= self._least_match:
                        best = places.length
                        end = int(places.ends[-1])
                        found = Guess(_up_to_border(other[end : end + self.most]), _ELSEWHERE + _kind(best))
        return found

    def add(self, text: I32, num_prompt: int, namespace: str) -> None:
        self.served.add(namespace, text[max(0, num_prompt - self._most_match) :])

    def _stores(self, namespace: str) -> list[TokenStore]:
        served = self.served.of(namespace)
        return [*([served] if served is not None else []), *self.corpora]


def _kind(length: int) -> int:
    kind = 0
    while kind + 1 < len(_LENGTHS) and length >= _LENGTHS[kind + 1]:
        kind += 1
    return kind


def _up_to_border(tokens: I32) -> I32:
    ends = np.flatnonzero(tokens < 0)
    return tokens[: ends[0]] if len(ends) else tokens
