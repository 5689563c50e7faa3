"""Moves single tokens' KV to other places and other positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bough.config.rope_facts import RopeFacts
from bough.core.step import KVMoves
from bough.layers.rotary import rope_frequencies
from bough.memory.mha import KVPool, Turn
from bough.memory.transfer import upload


class Mover:
    """Knows how each layer rotates. A key that was rotated to one position is turned to another by their difference."""

    def __init__(
        self, pool: KVPool, ropes: Sequence[RopeFacts | None], context_length: int, device: torch.device
    ) -> None:
        """`ropes`: one a layer, None where a layer does not rotate."""
        self._pool = pool
        self._device = device
        self._ropes = list(ropes)
        self._frequencies: dict[RopeFacts, Tensor] = {
            rope: rope_frequencies(rope, context_length).to(device) for rope in dict.fromkeys(ropes) if rope is not None
        }

    def move(self, moves: KVMoves) -> None:
        """Queues the copies. Waits for nothing."""
        source, target = (upload(at.astype(np.int64), self._device) for at in (moves.source, moves.target))
        turn = upload(moves.turn.astype(np.float32), self._device)
        turns = {rope: Turn(turn[:, None] * each, rope.interleaved) for rope, each in self._frequencies.items()}
        self._pool.move_tokens(source, target, [None if rope is None else turns[rope] for rope in self._ropes])
