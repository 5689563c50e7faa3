"""DFlash: a block of drafts in one pass. Its layers read the target's states as keys and values of the text so far, beside
those of the block: the newest token and places to be filled, which all see one another.

T tokens of a step, Q tokens of blocks, D width, N heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bough.config.draft_facts import Dflash, DraftFacts
from bough.kernels.attention import AttentionInputs
from bough.kernels.rotary import rope_and_write
from bough.layers.attention import Attention
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.draft_heads import TargetEnds
from bough.layers.linear import ReplicatedLinear
from bough.layers.parts import Parts
from bough.layers.stream import Stream


class DflashBlock(nn.Module):
    """A pre-norm block whose attention looks both ways."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        attention = parts.attention(layer)
        assert isinstance(attention, Attention), "read_draft knows no other"
        self.attn = attention
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.attn(stream.norm(self.attn_norm), batch))
        stream.add(self.mlp(stream.norm(self.mlp_norm)))

    def keep(self, features_TD: Tensor, positions_T: Tensor, inputs: AttentionInputs, loc_T: Tensor) -> None:
        """Writes the keys and values of the text: of the target's states, which pass no norm here."""
        attn = self.attn
        q_TNH, k_TKH, v_TKH = attn.qkv.heads(attn.qkv.product(features_TD))
        norms, rope, layer = attn.kernel_norms, attn.rope, attn.spec.layer
        assert rope is not None, "read_draft knows no other"
        rope_and_write(
            q_TNH[:0], k_TKH, v_TKH, positions_T, rope.cos_sin_PR, inputs.k_caches[layer], inputs.v_caches[layer], loc_T,
            None if norms is None else norms[0].weight, None if norms is None else norms[1].weight,
            1e-6 if norms is None else norms[1].eps, 0.0 if norms is None else norms[1].offset,
            interleaved=rope.interleaved, ranges=inputs.ranges_of(layer),
        )  # fmt: skip


class DflashModel(nn.Module):
    """The drafter. Embeddings and the output head are the target's."""

    def __init__(self, facts: DraftFacts, build: Build, target: TargetEnds) -> None:
        super().__init__()
        assert isinstance(facts.kind, Dflash)
        kind, model = facts.kind, facts.model
        parts = Parts(model, build)
        self.kind = kind
        self.fc = ReplicatedLinear(kind.num_taps * kind.target_hidden, model.hidden, build)
        self.hidden_norm = parts.norm()
        self.layers = nn.ModuleList(DflashBlock(parts, layer) for layer in range(model.num_layers))
        self.norm = parts.norm()
        self._target = (target,)  # in a tuple: not a part of this one

    def keep(self, states: list[Tensor], batch: Batch, inputs: AttentionInputs) -> None:
        """Writes what its layers will read of the step's tokens. `batch` says where."""
        features_TD = self.hidden_norm(self.fc(torch.cat(states, -1)))
        assert batch.loc_T is not None, "where keys and values go"
        for block in self.layers:
            assert isinstance(block, DflashBlock)
            block.keep(features_TD, batch.positions_T, inputs, batch.loc_T)

    def run(self, batch: Batch) -> Tensor:
        """[L, V]: logits at the places of blocks that `batch.logits_at` names."""
        stream = Stream(self._target[0].embed(batch.ids_T), batch)
        for block in self.layers:
            block(stream, batch)
        return self._target[0].logits(stream.last(self.norm))
