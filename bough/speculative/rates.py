"""How often drafts of a proposer on the device are right, by ranges of batch sizes."""

from __future__ import annotations

import numpy as np

from bough.core.step import I32
from bough.speculative.acceptance import F64

_PRIOR_RATE, _PRIOR_ROWS = 0.6, 16.0
"""How often a draft is right whose predecessors are, as long as nothing is known, and how many rows that counts as."""
_MEMORY_ROWS = 2000.0
"""Rows after which an older one counts a third."""
_FADED_ROWS = 8.0
"""Rows that all of it counts as after a long rest."""
GOOD_RATE = 0.8
"""How often drafts of a good head are right on texts that suit it."""


class PlaceRates:
    """By range of batch sizes and place: how often a draft is right if those before it are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tried: dict[int, F64] = {}
        self._right: dict[int, F64] = {}

    def observe(self, rows: int, drafts: I32, accepted: I32) -> None:
        """Of rows of one step: their drafts, and how many of them were right."""
        tried, right = self._of(rows)
        keep = float(np.exp(-len(drafts) / _MEMORY_ROWS))
        place = np.arange(self._most)
        tried *= keep
        right *= keep
        tried += np.count_nonzero((drafts[:, None] > place) & (accepted[:, None] >= place), axis=0)
        right += np.count_nonzero(accepted[:, None] > place, axis=0)

    def fade(self) -> None:
        """What was seen is long ago: it is taken for little, and drafts for somewhat better than they were."""
        for rows, tried in self._tried.items():
            rate = 0.5 * (self._right[rows] / tried + GOOD_RATE)
            tried[:] = _FADED_ROWS
            self._right[rows][:] = _FADED_ROWS * rate

    def expected(self, rows: int) -> F64:
        """[most + 1]: tokens that a row yields in a step, by its number of drafts."""
        tried, right = self._of(rows)
        survival = np.multiply.accumulate(right / tried)
        return np.concatenate(([1.0], 1.0 + np.add.accumulate(survival)))

    def _of(self, rows: int) -> tuple[F64, F64]:
        if rows not in self._tried:
            nearest = min(self._tried, key=lambda each: abs(each - rows), default=None)
            rate = np.full(self._most, _PRIOR_RATE) if nearest is None else self._right[nearest] / self._tried[nearest]
            self._tried[rows] = np.full(self._most, _PRIOR_ROWS)
            self._right[rows] = _PRIOR_ROWS * rate
        return self._tried[rows], self._right[rows]


class TreeRates:
    """By range of batch sizes and number of nodes: how many nodes are on the path that is taken."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, dict[int, tuple[float, float]]] = {}
        """Range -> nodes -> rows and their accepted nodes, older ones counting less."""

    def observe(self, rows: int, drafts: I32, accepted: I32) -> None:
        keep = float(np.exp(-len(drafts) / _MEMORY_ROWS))
        known = self._seen.setdefault(rows, {})
        for count in np.unique(drafts).tolist():
            mine = drafts == count
            before, right = known.get(count, (0.0, 0.0))
            known[count] = keep * before + np.count_nonzero(mine), keep * right + float(accepted[mine].sum())

    def fade(self) -> None:
        """As `PlaceRates.fade`."""
        self._seen.clear()

    def expected(self, rows: int) -> F64:
        """[most + 1]: tokens that a row yields in a step, by its number of nodes. Twice as many nodes add about as much each
        time, so what was not tried lies on a line over the logarithm."""
        nearest = min(self._seen, key=lambda each: abs(each - rows), default=None)
        points = {0: 1.0}
        for count, (tried, right) in ({} if nearest is None else self._seen[nearest]).items():
            prior = _PRIOR_RATE * (1.0 + np.log2(count)) / 2.0
            points[count] = 1.0 + (right + _PRIOR_ROWS * prior) / (tried + _PRIOR_ROWS)
        if len(points) == 1:
            points[self._most] = 1.0 + _PRIOR_RATE * (1.0 + np.log2(self._most)) / 2.0
        counts = sorted(points)
        made: F64 = np.interp(
            np.log1p(np.arange(self._most + 1)), np.log1p(counts), [points[count] for count in counts]
        )
        return made
