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


class StatePool:
    """In float32: state 0 is that of a row that begins, then come those of slots, then snapshots."""

    def __init__(self, shapes: Sequence[Shapes], num_slots: int, num_snapshots: int, device: torch.device) -> None:
        """`shapes`: by layer that keeps a state."""
        self.num_slots = num_slots
        self.device = device
        count = 1 + num_slots + num_snapshots
        self.layers: list[tuple[Tensor, ...]] = [
            tuple(torch.zeros(count, *shape, dtype=torch.float32, device=device) for shape in each) for each in shapes
        ]

    def load(self, slots: I32, places: I32) -> None:
        """Slots get the states of these snapshots, counted from 1 on; 0: that of a row that begins."""
        target = upload(slots.astype(np.int64) + 1, self.device)
        source = upload(self.snapshots(places), self.device)
        for layer in self.layers:
            for each in layer:
                each[target] = each[source]

    def snapshots(self, places: I32) -> I64:
        """Where snapshots are among the states; 0 stays 0."""
        found: I64 = np.where(places > 0, places.astype(np.int64) + self.num_slots, 0)
        return found
