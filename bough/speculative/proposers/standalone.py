"""A small model of the same tokenizer drafts, token by token, from its own KV of the same texts."""

from __future__ import annotations

from torch import Tensor

from bough.layers.batch import Model
from bough.runner.proposing import Drafting, Reads


class StandaloneProposer:
    """Drives a `Model` whose KV lies behind the target's."""

    reads = Reads()

    def __init__(self, model: Model, num_layers: int, last_layer: int, vocab: int) -> None:
        """`vocab`: the target's; what its own has beyond that is padding, and never drafted."""
        self.model = model
        self.num_layers = num_layers
        self._last_layer = last_layer
        self._vocab = vocab

    def propose(self, step: Drafting) -> list[Tensor]:
        """In steps of decode rows its KV lacks of each row the token before its newest at most, if that was its last draft:
        both are brought in at once. Prompts are computed like the target's."""
        if step.bounds.only_decodes:
            hidden_RD = self.model.forward(step.last_two())
        else:
            self.model.forward(step.whole(step.tensors.ids_T, self._last_layer))
            if not step.count:
                return []
            hidden_RD = self.model.forward(step.behind(step.rows.last_R, 0))
        drafts: list[Tensor] = []
        for place in range(step.count):
            if place:
                hidden_RD = self.model.forward(step.behind(drafts[-1], place))
            drafts.append(step.draw(self.model.logits(hidden_RD)[:, : self._vocab], place))
        return drafts
