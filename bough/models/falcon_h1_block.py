"""Falcon-H1's block."""

from __future__ import annotations

from torch import nn

from bough.config.fields import Fields
from bough.layers.batch import Batch
from bough.layers.parts import Parts
from bough.layers.stream import Stream


class FalconH1Block(nn.Module):
    """Mamba and attention read one norm of the stream. What they and the feed-forward block add is scaled."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        config = Fields(parts.facts.config)
        self.attn_norm = parts.norm()
        self.state = parts.mixer(layer, 0)
        self.attn = parts.mixer(layer, 1)
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        self.state_scale = config.number("ssm_out_multiplier", default=1.0)
        # What attention reads is scaled, too, and so are values.
        self.attn_scale = config.number("attention_out_multiplier", default=1.0)
        self.attn_scale *= config.number("attention_in_multiplier", default=1.0)
        self.mlp_scale = (config.numbers("mlp_multipliers", 2) or (1.0, 1.0))[1]

    def forward(self, stream: Stream, batch: Batch) -> None:
        x = stream.norm(self.attn_norm).now()
        stream.add(self.state(x, batch), self.state_scale)
        stream.add(self.attn(x, batch), self.attn_scale)
        stream.add(self.mlp(stream.norm(self.mlp_norm)), self.mlp_scale)
