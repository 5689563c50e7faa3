"""Recurrent states in the oracle: per row, the sum from which its answers are computed, and its number of tokens.

A row that goes on from another prefix's state, from a state of another length, or from a place that was given away, reads
another sum than its pages say.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bough.core.step import RunnerLimits, Step

U64 = npt.NDArray[np.uint64]


class OracleState(NamedTuple):
    """What is kept of a prefix."""

    total: int
    num_tokens: int


_BEGINNING = OracleState(0, 0)
_GARBAGE = OracleState(-7, -7)
_NO_SUMS: U64 = np.empty(0, np.uint64)


class OracleStates:
    """What the device has of states."""

    def __init__(self, limits: RunnerLimits) -> None:
        self.kept = limits.num_snapshots is not None
        self._slots = [_GARBAGE] * limits.num_slots
        self._drafts: list[U64] = [_NO_SUMS] * limits.num_slots
        """By slot: the sums up to each draft of its last step, which its state has not taken in."""
        self._places = [_BEGINNING, *([_GARBAGE] * (limits.num_snapshots or 0))]

    def begin(self, step: Step) -> None:
        """Loads the states of rows that enter."""
        if step.states is not None:
            for slot, place in zip(step.states.load_slots.tolist(), step.states.load_from.tolist(), strict=True):
                self._slots[slot] = self._places[place]
                self._drafts[slot] = _NO_SUMS

    def advance(self, step: Step, row: int, slot: int, context: int, sums: U64) -> str:
        """Takes in the sums up to each of a row's certain tokens, as its pages have them; `context`: tokens before them.
        Saves what the step says. Returns what is wrong; empty: nothing."""
        before = self._slots[slot]
        certain = len(sums) - (int(step.drafts[row]) if row < len(step.drafts) else 0)
        self._slots[slot] = OracleState(int(sums[certain - 1]), context + certain)
        self._drafts[slot] = sums[certain:]
        if step.states is not None:
            for at in np.flatnonzero(step.states.save_rows == row).tolist():
                after = int(step.states.save_after[at])
                self._places[int(step.states.save_to[at])] = OracleState(int(sums[after - 1]), context + after)
                if after > certain:
                    return f"saves a state behind {after} tokens, of which {certain} are certain"
        return (
            "" if before.num_tokens == context else f"has a state of {before.num_tokens} tokens, goes on from {context}"
        )

    def take_in(self, slot: int, context: int) -> int:
        """The slot's state takes in those drafts of its last step that were right: its row has `context` tokens. Returns the
        sum up to there."""
        state, drafts = self._slots[slot], self._drafts[slot]
        right = context - state.num_tokens
        if 0 < right <= len(drafts):
            self._slots[slot] = OracleState(int(drafts[right - 1]), context)
        self._drafts[slot] = _NO_SUMS
        return self._slots[slot].total

    def spoil(self, step: Step) -> None:
        """A failed step leaves garbage where it wrote."""
        for slot in step.slots.tolist():
            self._slots[slot] = _GARBAGE
        if step.states is not None:
            for place in step.states.save_to.tolist():
                self._places[place] = _GARBAGE
