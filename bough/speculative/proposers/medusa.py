"""Medusa: heads on the target's last state, each for one draft."""

from __future__ import annotations

from torch import Tensor

from bough.layers.medusa import MedusaHeads
from bough.runner.proposing import Drafting, Reads, TreeDrafts
from bough.speculative.proposers.tree import Frontier, TreeShape, grow_tree
from bough.speculative.proposers.vocabulary import draw_among


class MedusaProposer:
    """Drives `MedusaHeads`. It keeps no KV, so a row may be drafted for from any step on."""

    reads = Reads(sampled=True)
    num_layers = 0

    def __init__(self, heads: MedusaHeads, vocab: int, shape: TreeShape | None = None) -> None:
        """`vocab`: the target's. `shape`: of trees; None: each draft follows the one before it."""
        self.heads = heads
        self._vocab = vocab
        self._shape = shape

    def propose(self, step: Drafting) -> list[Tensor] | TreeDrafts:
        hidden_RD, ids_V = step.hidden_RD, self.heads.target_ids_V
        shape = self._shape
        if shape is not None and step.count:
            topk = shape.topk

            def expand(frontier: Frontier) -> Tensor:
                """A head guesses its token whatever comes before it."""
                return self.heads.logits(hidden_RD, frontier.number + 1)[:, None].expand(-1, topk, -1)

            return grow_tree(self.heads.logits(hidden_RD, 0), expand, shape, step.count, ids_V)
        return [
            draw_among(step, self.heads.logits(hidden_RD, place), place, ids_V, self._vocab)
            for place in range(step.count)
        ]
