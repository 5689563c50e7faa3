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
        # Lists: one entry is changed at a time, in every step of a row.
        self._tried = [[0.0] * num_places for _ in range(num_kinds)]
        self._right = [[0.0] * num_places for _ in range(num_kinds)]
        self._prior_weight = [[_PRIOR_WEIGHT] * num_places for _ in range(num_kinds)]
        self._rate: list[list[float]] = [[rate] * num_places for rate in prior.tolist()]
        self._prior: list[float] = prior.tolist()
        self._row_right = [_ROW_WEIGHT] * num_slots
        self._row_expected = [_ROW_WEIGHT] * num_slots

    def begin(self, slot: int) -> None:
        """Another request has the slot: nothing is known of it."""
        self._row_right[slot] = self._row_expected[slot] = _ROW_WEIGHT

    def rates(self, kind: int, slot: int, count: int) -> F64:
        """Of each of the first `count` places: how likely the draft there is right, given that those before it are."""
        fares = min(max(self._row_right[slot] / self._row_expected[slot], _LEAST), _MOST)
        rates: F64 = np.minimum(fares * np.array(self._rate[kind][:count]), _SUREST)
        return rates

    def observe(self, kind: int, slot: int, num_right: int, num_tried: int) -> None:
        """Of `num_tried` drafts the first `num_right` were right."""
        seen = min(num_right + 1, num_tried)
        tried, right, weights, rates = (
            each[kind] for each in (self._tried, self._right, self._prior_weight, self._rate)
        )
        expected, survival = 0.0, 1.0
        for place in range(seen):
            survival *= rates[place]
            expected += survival
            tried[place] = _DECAY * tried[place] + 1.0
            right[place] = _DECAY * right[place] + (1.0 if place < num_right else 0.0)
            weights[place] *= _DECAY
        self._row_right[slot] = _ROW_DECAY * self._row_right[slot] + num_right
        self._row_expected[slot] = _ROW_DECAY * self._row_expected[slot] + expected
        rate = self._prior[kind]
        for place, weight in enumerate(weights):
            # One of which nothing is known fares as the one before it.
            rates[place] = rate = (right[place] + weight * rate) / (tried[place] + weight)

    def table(self) -> F64:
        """Rates of [kind, place], all rows together."""
        return np.array(self._rate)
