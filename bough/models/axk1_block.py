"""A.X K1's block."""

from __future__ import annotations

from torch import nn

from bough.config.model_facts import Moe
from bough.layers.batch import Batch
from bough.layers.parts import Parts
from bough.layers.stream import Stream


class ExpertsNormBlock(nn.Module):
    """Llama's; what experts give is normed before it is added."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        self.attn = parts.attention(layer)
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        self.after_mlp_norm = parts.norm() if isinstance(parts.layer(layer).ffn, Moe) else None

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.attn(stream.norm(self.attn_norm), batch))
        added = self.mlp(stream.norm(self.mlp_norm))
        stream.add(added if self.after_mlp_norm is None else self.after_mlp_norm(added))
