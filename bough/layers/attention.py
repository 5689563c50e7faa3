"""The place in a model where attention happens. The batch brings the backend that knows the pages."""

from __future__ import annotations

from torch import Tensor, nn

from bough.config.model_facts import ModelFacts
from bough.layers.batch import AttentionSpec, Batch
from bough.layers.build import Build
from bough.layers.linear import kv_heads_per_rank


class Attention(nn.Module):
    """One layer's attention over this rank's heads."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, batch: Batch) -> Tensor:
        """[T, N * H]"""
        return batch.attention.forward(self.spec, q_TNH, k_TKH, v_TKH)


def attention_of(facts: ModelFacts, layer: int, build: Build) -> Attention:
    """The attention of a layer as the facts describe it: heads, scale, window, soft cap."""
    return Attention(
        AttentionSpec(
            layer=layer,
            num_heads=build.mesh.share(facts.num_heads, "attention heads"),
            num_kv_heads=kv_heads_per_rank(facts.num_kv_heads, build),
            head_dim=facts.head_dim,
            scale=facts.attention_scale,
            window=facts.windows[layer],
            softcap=facts.attention_softcap,
        )
    )
