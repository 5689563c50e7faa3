"""How often drafts are right: by the kind of guess and the place in it, and by how a row has fared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

_DECAY = 0.98
"""What an older observation counts less for each newer one of its kind."""
_PRIOR_WEIGHT = 4.0
"""Observations that the first guess of a rate counts as."""
_ROW_WEIGHT = 2.0
"""Expected right drafts after which a row's own record counts as much as that of all rows."""
_ROW_DECAY = 0.85
_LEAST, _MOST = 0.05, 1.5
"""Bounds of how much worse or better a row may fare than others."""
_SUREST = 0.995


class Acceptance:
    """Rates of [kind, place]: of drafts of that kind that were right so far, how many are at that place, too."""

    def __init__(self, num_kinds: int, num_places: int, prior: F64, num_slots: int) -> None:
        """`prior`: [kinds], the rate of the first place to begin with."""
        self._tried: F64 = np.zeros((num_kinds, num_places))
        self._right: F64 = np.zeros((num_kinds, num_places))
        self._rate: F64 = np.broadcast_to(prior[:, None], (num_kinds, num_places)).copy()
        self._prior = prior
        self._prior_weight: F64 = np.full((num_kinds, num_places), _PRIOR_WEIGHT)
        self._row_right = np.full(num_slots, _ROW_WEIGHT)
        self._row_expected = np.full(num_slots, _ROW_WEIGHT)

    def begin(self, slot: int) -> None:
        """Another request has the slot: nothing is known of it."""
        self._row_right[slot] = self._row_expected[slot] = _ROW_WEIGHT

    def rates(self, kind: int, slot: int, count: int) -> F64:
        """Of each of the first `count` places: how likely the draft there is right, given that those before it are."""
        fares = min(max(self._row_right[slot] / self._row_expected[slot], _LEAST), _MOST)
        rates: F64 = np.minimum(fares * self._rate[kind, :count], _SUREST)
        return rates

    def observe(self, kind: int, slot: int, num_right: int, num_tried: int) -> None:
        """Of `num_tried` drafts the first `num_right` were right."""
        seen = min(num_right + 1, num_tried)
        places = slice(0, seen)
        expected = float(np.cumprod(self._rate[kind, places]).sum())
        self._row_right[slot] = _ROW_DECAY * self._row_right[slot] + num_right
        self._row_expected[slot] = _ROW_DECAY * self._row_expected[slot] + expected
        self._tried[kind, places] = _DECAY * self._tried[kind, places] + 1.0
        self._right[kind, places] *= _DECAY
        self._prior_weight[kind, places] *= _DECAY
        self._right[kind, :num_right] += 1.0
        rate = float(self._prior[kind])
        known = np.stack((self._right[kind], self._tried[kind], self._prior_weight[kind]), 1).tolist()
        for place, (right, tried, weight) in enumerate(known):
            # One of which nothing is known fares as the one before it.
            rate = (right + weight * rate) / (tried + weight)
            self._rate[kind, place] = rate

    def table(self) -> F64:
        """Rates of [kind, place], all rows together."""
        return self._rate
