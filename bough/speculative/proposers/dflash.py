"""DFlash: a block of drafts in one pass over the newest token and places to be filled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.layers.dflash import DflashModel
from bough.runner.proposing import Drafting, Reads


class DflashProposer:
    """Drives a `DflashModel`."""

    def __init__(self, model: DflashModel, taps: Sequence[int], num_layers: int) -> None:
        """`taps`: as in `DraftFacts`."""
        self.model = model
        self.num_layers = num_layers
        self.reads = Reads(tuple(sorted(set(taps))))
        self._order = [self.reads.layers.index(layer) for layer in taps]

    def propose(self, step: Drafting) -> list[Tensor]:
        """Its keys and values of the step's tokens come from the target's states; those of the block are overwritten when
        the target has computed what became of it."""
        self.model.keep([step.states[place] for place in self._order], *step.keeping())
        if not step.count:
            return []
        size = self.model.kind.block_size
        masks = torch.full_like(step.rows.last_R, self.model.kind.mask_id)[:, None].expand(-1, size - 1)
        logits = self.model.run(step.block(torch.cat((step.rows.last_R[:, None], masks), 1)))
        by_place = logits.view(len(step.rows.last_R), size - 1, -1)
        return [step.draw(by_place[:, place], place) for place in range(step.count)]
