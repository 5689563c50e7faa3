"""Medusa: heads on the target's last state, each for one draft."""

from __future__ import annotations

from torch import Tensor

from bough.layers.medusa import MedusaHeads
from bough.runner.proposing import Drafting, Reads
from bough.speculative.proposers.vocabulary import draw_among


class MedusaProposer:
    """Drives `MedusaHeads`. It keeps no KV, so a row may be drafted for from any step on."""

    reads = Reads(sampled=True)
    num_layers = 0

    def __init__(self, heads: MedusaHeads, vocab: int) -> None:
        """`vocab`: the target's."""
        self.heads = heads
        self._vocab = vocab

    def propose(self, step: Drafting) -> list[Tensor]:
        hidden_RD, ids_V = step.hidden_RD, self.heads.target_ids_V
        return [
            draw_among(step, self.heads.logits(hidden_RD, place), place, ids_V, self._vocab)
            for place in range(step.count)
        ]
