"""States of layers that keep one, of the rows of all slots, and snapshots of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bough.core.step import I32, I64
from bough.memory.transfer import upload

Shapes = tuple[tuple[int, ...], ...]
"""Of what one layer keeps of a row."""


COPIED_BYTES = 64 << 20
"""States that are copied at once, at most, unless those of one layer are larger."""


class StatePool:
    """In float32: state 0 is that of a row that begins, then come those of slots and one for padding, then snapshots."""

    def __init__(
        self,
        shapes: Sequence[Shapes],
        num_slots: int,
        num_snapshots: int,
        device: torch.device,
        *,
        inputs: Sequence[int] = (),
        most_drafts: int = 0,
    ) -> None:
        """`shapes`: by layer that keeps a state. `inputs`: by layer, numbers that its recurrence takes of a token, where
        rows may have `most_drafts` drafts."""
        self.num_slots = num_slots
        self.device = device
        count = 2 + num_slots + num_snapshots  # as `config.step_memory` plans
        self._alike: list[Tensor] = []
        """[layers, states, ...]: layers that keep the same beside one another, so that one launch copies states of all."""
        self.layers: list[tuple[Tensor, ...]] = [()] * len(shapes)
        for kind in dict.fromkeys(shapes):
            places = [place for place, each in enumerate(shapes) if each == kind]
            kept = [torch.zeros(len(places), count, *shape, dtype=torch.float32, device=device) for shape in kind]
            self._alike += kept
            for number, place in enumerate(places):
                self.layers[place] = tuple(each[number] for each in kept)

        self.most_drafts = most_drafts
        self.kept: list[Tensor] = []
        """By layer: what its recurrence takes of each slot's drafts, of which the next step takes in the right ones..."""
        self.num_taken = torch.zeros(num_slots + 1 if most_drafts else 0, dtype=torch.int64, device=device)
        """...and by slot: the tokens that its state has taken in; empty where rows have no drafts."""
        if most_drafts:
            self.kept = [
                torch.zeros(num_slots + 1, most_drafts, values, dtype=torch.float32, device=device) for values in inputs
            ]

    @property
    def padding(self) -> int:
        """The state that takes what padding writes."""
        return self.num_slots + 1

    def load(self, slots: I32, places: I32) -> None:
        """Slots get the states of these snapshots, counted from 1 on; 0: that of a row that begins."""
        self._copy(self.snapshots(places), slots.astype(np.int64) + 1)

    def save(self, slots: I32, places: I32) -> None:
        """Snapshots get the states of these slots."""
        self._copy(slots.astype(np.int64) + 1, self.snapshots(places))

    def snapshots(self, places: I32) -> I64:
        """Where snapshots are among the states; 0 stays 0."""
        found: I64 = np.where(places > 0, places.astype(np.int64) + self.num_slots + 1, 0)
        return found

    def _copy(self, source: I64, target: I64) -> None:
        source_N, target_N = upload(source, self.device), upload(target, self.device)
        for alike in self._alike:
            layer_bytes = len(source) * alike[0, 0].nbytes
            for layers in torch.split(alike, max(1, COPIED_BYTES // layer_bytes)):
                layers.index_copy_(1, target_N, layers.index_select(1, source_N))
