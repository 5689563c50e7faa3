"""Prompts that end in items which don't see each other: where their tokens stand, and which keys are hidden from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.core.step import SlotSetup, Step
from bough.memory.transfer import upload

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class ItemChunk:
    """The part of a row's chunk that lies in its items: X tokens, one after another."""

    row: int
    first: int
    """Index into the step's tokens."""
    shared: int
    """Tokens of the row that all items see."""
    at_X: Ints
    """Places of the tokens in the row."""
    start_X: Ints
    """Where in the row the item of each begins."""
    ends_X: npt.NDArray[np.bool_]
    """Which are the last of their items."""

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + len(self.at_X))


@dataclass(slots=True)
class StepItems:
    """All of a step's tokens that are in items."""

    chunks: list[ItemChunk]

    def scored(self, row: int) -> Ints:
        """Indices into the step's tokens of the last tokens of a row's items."""
        for chunk in self.chunks:
            if chunk.row == row:
                return chunk.first + np.flatnonzero(chunk.ends_X)
        return np.empty(0, np.int64)

    def positions(self, positions_T: Tensor) -> Tensor:
        """Positions of the step's tokens: those of items count on from the end of what all items see."""
        made = positions_T.clone()
        for chunk in self.chunks:
            made[chunk.tokens] = upload(chunk.shared + chunk.at_X - chunk.start_X, made.device)
        return made

    def gaps(self, num_tokens: int, device: torch.device) -> Tensor:
        """int32 [T, 2]: for `AttentionInputs.gaps_T2`."""
        made = np.zeros((num_tokens, 2), np.int32)
        for chunk in self.chunks:
            made[chunk.tokens, 0] = chunk.shared
            made[chunk.tokens, 1] = chunk.start_X
        return upload(made, device)


def items_of(step: Step, setups: Mapping[int, SlotSetup]) -> StepItems | None:
    """The tokens of a step that are in items; None: there are none. `setups`: by slot, of those that ask for scores."""
    found: list[ItemChunk] = []
    ends = None
    for row in range(step.num_decodes, step.num_rows):
        setup = setups.get(int(step.slots[row]))
        if setup is None or setup.items is None:
            continue
        ends = np.cumsum(step.num_query) if ends is None else ends
        context, num = int(step.context[row]), int(step.num_query[row])
        before = max(setup.items_at - context, 0)
        if before >= num:
            continue
        borders = setup.items_at + np.concatenate(([0], np.cumsum(setup.items, dtype=np.int64)))
        at = np.arange(context + before, context + num, dtype=np.int64)
        item = np.searchsorted(borders, at, side="right") - 1
        first = int(ends[row]) - num + before
        found.append(ItemChunk(row, first, setup.items_at, at, borders[item], borders[item + 1] == at + 1))
    return StepItems(found) if found else None
