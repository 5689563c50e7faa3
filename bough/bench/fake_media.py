"""Media in the oracle: a store of rows with the content of items, and positions that follow from what was read.

An item's features are as many numbers as it has positions, and its "tower" copies them. A token of media is the number in
the row that its step names, so that a row which was given away too early, or never computed, gives another answer. All
positions of an item are one, and text goes on behind it: the oracle can tell from the tokens that it reads where each is.

Where cross attention reads media, their numbers are copied to pages, and every token of the row is one that depends on them:
it is larger by a *mark* of all that the row's pages hold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bough.core.step import RunnerLimits, Step

FIRST_MEDIA = 1 << 20
"""Numbers of media tokens begin here: `FIRST_MEDIA * (1 + item) + place`."""
_NOTHING = -1
_GARBAGE = -7


def media_tokens(item: int, count: int) -> npt.NDArray[np.int64]:
    """The tokens of an item."""
    return FIRST_MEDIA * (1 + item) + np.arange(count, dtype=np.int64)


def positions_of(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The position of each token: consecutive for text, equal for all tokens of an item."""
    items = tokens // FIRST_MEDIA
    follows = np.zeros(len(tokens), np.bool_)
    follows[1:] = (items[1:] > 0) & (items[1:] == items[:-1]) & (tokens[1:] == tokens[:-1] + 1)
    positions: npt.NDArray[np.int64] = np.cumsum(~follows) - 1
    return positions


def media_mark(values: npt.NDArray[np.int64]) -> int:
    """What tokens are larger by, of rows whose cross attention reads these numbers."""
    return FIRST_MEDIA * (1 + int((values * (1 + np.arange(len(values)))).sum() % 1009)) if len(values) else 0


class OracleMedia:
    """What the device has of media."""

    def __init__(self, limits: RunnerLimits) -> None:
        num_rows = 0 if limits.media is None else limits.media.num_rows
        self.axes = 0 if limits.media is None else limits.media.axes
        self._rows = np.full(num_rows, _NOTHING, np.int64)
        self._turn = np.zeros(limits.num_slots, np.int64)
        self.lengths = np.zeros(limits.num_slots, np.int64)
        """By slot: positions that cross attention reads."""

    def begin(self, step: Step) -> None:
        """Computes the step's items, and turns its slots."""
        if step.media is not None:
            for each in step.media.encode:
                self._rows[each.rows] = each.features
            self._turn[step.media.turn_slots] = step.media.turns
            self.lengths[step.media.fixed_slots] = step.media.fixed_lengths

    def fresh(self, step: Step) -> npt.NDArray[np.int64]:
        """What the step copies to pages for cross attention."""
        rows = step.media.fixed_rows if step.media is not None else np.empty(0, np.int32)
        copied: npt.NDArray[np.int64] = self._rows[rows]
        return copied

    def spoil(self, step: Step) -> None:
        """A failed step leaves garbage where it wrote."""
        if step.media is not None:
            for each in step.media.encode:
                self._rows[each.rows] = _GARBAGE

    def tokens(self, step: Step) -> npt.NDArray[np.int64]:
        """The step's tokens, those of media as its rows have them."""
        tokens = step.tokens.astype(np.int64)
        if step.media is not None:
            tokens[step.media.at] = self._rows[step.media.rows]
        return tokens

    def stands_at(self, step: Step, slot: int, first: int, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions of a row's tokens, which lie at `at` in memory and from `first` on in the step."""
        positions: npt.NDArray[np.int64] = at + self._turn[slot]
        if step.media is not None and len(step.media.axes_at):
            places = first + np.arange(len(at))
            found = np.searchsorted(step.media.axes_at, places)
            found = np.minimum(found, len(step.media.axes_at) - 1)
            given = step.media.axes_at[found] == places
            positions[given] = step.media.axes[0, found[given]]
        return positions
