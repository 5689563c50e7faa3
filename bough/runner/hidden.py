"""Hidden states for requests that ask for them: which tokens of a step they are, and their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bough.core.step import SlotSetup, Step
from bough.memory.transfer import download


@dataclass(slots=True)
class HiddenWanted:
    """Tokens of a step whose states are wanted, row after row."""

    at: npt.NDArray[np.int64]
    rows: list[int]
    counts: list[int]
    states: Tensor | None = None
    """On the host once the step is done."""

    def keep(self, states: Tensor) -> None:
        """Queues the copy of the states [len(at), width] to the host."""
        self.states = download(states.float())

    def by_row(self) -> dict[int, npt.NDArray[np.float32]]:
        """Call when the step is done."""
        assert self.states is not None, "kept when the step was launched"
        values = self.states.numpy()
        ends = np.cumsum(self.counts)
        return {
            row: values[end - count : end]
            for row, count, end in zip(self.rows, self.counts, ends.tolist(), strict=True)
        }


class HiddenSlots:
    """The slots whose requests want states: of all their tokens, or of the one before each sample."""

    def __init__(self) -> None:
        self._asked: dict[int, str] = {}

    def note(self, setup: SlotSetup) -> None:
        """Call for every setup: a reused slot must forget what was asked before."""
        if setup.hidden_states:
            self._asked[setup.slot] = setup.hidden_states
        else:
            self._asked.pop(setup.slot, None)

    def of(self, step: Step) -> HiddenWanted | None:
        """What of this step is wanted; None: nothing."""
        if not self._asked:
            return None
        at, rows, counts = [], [], []
        ends = np.cumsum(step.num_query)
        for row in np.flatnonzero(np.isin(step.slots, list(self._asked))).tolist():
            mode, end = self._asked[int(step.slots[row])], int(ends[row])
            count = int(step.num_query[row])
            if mode != "all":
                count = int(step.samples[row]) + (int(step.drafts[row]) if row < len(step.drafts) else 0)
            if count:
                at.append(np.arange(end - count, end))
                rows.append(row)
                counts.append(count)
        return HiddenWanted(np.concatenate(at).astype(np.int64), rows, counts) if rows else None
