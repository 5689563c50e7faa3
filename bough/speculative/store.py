"""Tokens that were served before, or that an operator has brought, indexed by what they follow.

Texts are gathered in a small buffer, which is looked through token by token, until it is worth an index: the hashes of all
runs of `GRAM` tokens, sorted. A look-up is a binary search in each such segment. An index takes 16 bytes a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bough.core.step import I32, I64
from bough.speculative.matching import NOWHERE, MatchPlaces, narrow

GRAM = 3
"""Tokens that must agree before anything is found here: shorter runs are everywhere."""
YOUNG_TOKENS = 4096
"""A buffer of as many tokens becomes a segment: sorting it takes 0.3 ms."""
SEGMENT_TOKENS = 65536
"""Small segments are joined until they have as many: sorting those takes 6 ms."""
BORDER = -1
"""Stands between texts: no token is the same."""

U64 = npt.NDArray[np.uint64]


def hashes(text: I32) -> U64:
    """Of each run of `GRAM` tokens: that of the run that ends before token `GRAM + i` is entry i."""
    if len(text) < GRAM:
        return np.empty(0, np.uint64)
    wide = text.astype(np.uint64)
    mixed = np.zeros(len(text) - GRAM + 1, np.uint64)
    with np.errstate(over="ignore"):
        for place in range(GRAM):
            mixed = (mixed ^ wide[place : len(wide) - GRAM + 1 + place]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    return mixed


class IndexedTexts:
    """Some texts and the index of their runs."""

    def __init__(self, text: I32) -> None:
        self.text = text
        found = hashes(text)
        order = np.argsort(found, kind="stable")
        self._hashes = found[order]
        self._ends = (order + GRAM).astype(np.int32)

    def find(self, suffix: I32, hashed: np.uint64, most: int) -> MatchPlaces:
        low, high = np.searchsorted(self._hashes, hashed, "left"), np.searchsorted(self._hashes, hashed, "right")
        ends = np.sort(self._ends[low:high]).astype(np.int64)
        ends = ends[ends < len(self.text)]
        return _of_run(self.text, ends, suffix, most)


def _of_run(text: I32, ends: I64, suffix: I32, most: int) -> MatchPlaces:
    """Of places behind runs whose hashes agree, those that really do, and agree in most tokens."""
    found = narrow(text, ends, suffix, 0, most)
    if found.length < GRAM:
        return NOWHERE
    follows = found.ends[text[found.ends] != BORDER]
    return MatchPlaces(follows, found.length) if len(follows) else NOWHERE


class TokenStore:
    """The texts of one namespace."""

    def __init__(self) -> None:
        self.segments: list[IndexedTexts] = []
        self._young: list[I32] = []
        self._num_young = 0
        self._joined: I32 | None = None

    @property
    def num_tokens(self) -> int:
        return self._num_young + sum(len(segment.text) for segment in self.segments)

    def add(self, text: I32) -> None:
        """Takes a text in."""
        border = np.array([BORDER], np.int32)
        for begin in range(0, len(text), SEGMENT_TOKENS):
            piece = text[begin : begin + SEGMENT_TOKENS]
            self._young += [piece.astype(np.int32), border]
            self._num_young += len(piece) + 1
            self._joined = None
            if self._num_young >= YOUNG_TOKENS:
                self._grow()

    def find(self, suffix: I32, most: int) -> Iterator[tuple[I32, MatchPlaces]]:
        """Texts and the places in them that agree with the end of `suffix` in at least `GRAM` tokens, the newest first."""
        if len(suffix) < GRAM:
            return
        if self._young:
            if self._joined is None:
                self._joined = np.concatenate(self._young)
            ends = np.flatnonzero(self._joined[:-1] == suffix[-1]) + 1
            places = _of_run(self._joined, ends, suffix, most)
            if len(places.ends):
                yield self._joined, places
        hashed = hashes(suffix[-GRAM:])[0]
        for segment in reversed(self.segments):
            places = segment.find(suffix, hashed, most)
            if len(places.ends):
                yield segment.text, places

    def drop_oldest(self) -> bool:
        """Forgets the oldest segment, or what has no index yet. False: there is nothing left."""
        if self.segments:
            del self.segments[0]
            return True
        had, self._young, self._num_young, self._joined = bool(self._young), [], 0, None
        return had

    def _grow(self) -> None:
        """The young tokens get an index, together with the small segments before them."""
        texts = [np.concatenate(self._young)]
        while self.segments and len(self.segments[-1].text) <= SEGMENT_TOKENS // 2:
            small = self.segments[-1].text
            if len(small) > sum(map(len, texts)):  # joined when there is as much again: each token is sorted few times
                break
            texts.insert(0, self.segments.pop().text)
        self.segments.append(IndexedTexts(np.concatenate(texts)))
        self._young, self._num_young, self._joined = [], 0, None


class ServedTexts:
    """What was served, by namespace: no request sees the texts of another tenant or adapter. The oldest go first."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._stores: dict[str, TokenStore] = {}
        self._order: deque[str] = deque()
        """Namespaces as texts came in; the oldest text's first."""
        self._num_tokens = 0

    def add(self, namespace: str, text: I32) -> None:
        if not self._capacity or not len(text):
            return
        store = self._stores.setdefault(namespace, TokenStore())
        before = store.num_tokens
        store.add(text)
        self._num_tokens += store.num_tokens - before
        self._order.append(namespace)
        while self._num_tokens > self._capacity and self._order:
            self._drop(self._order.popleft())

    def of(self, namespace: str) -> TokenStore | None:
        return self._stores.get(namespace)

    def _drop(self, namespace: str) -> None:
        store = self._stores.get(namespace)
        if store is None:
            return
        before = store.num_tokens
        store.drop_oldest()
        self._num_tokens -= before - store.num_tokens
        if not store.num_tokens:
            del self._stores[namespace]
