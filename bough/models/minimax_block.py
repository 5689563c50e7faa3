"""MiniMax's block."""

from __future__ import annotations

from torch import nn

from bough.config.fields import Fields
from bough.config.state_facts import Lightning
from bough.layers.batch import Batch
from bough.layers.parts import Parts
from bough.layers.stream import Stream


class MiniMaxBlock(nn.Module):
    """The stream is normed before each half, which then adds to that. Both addends are scaled."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        self.attn = parts.attention(layer)
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        config = Fields(parts.facts.config)
        kind = "linear" if isinstance(parts.layer(layer).mixers[0], Lightning) else "full"
        self.attn_scales = _scales(config, f"{kind}_attn", f"{kind}_attention")
        self.mlp_scales = _scales(config, "mlp", "mlp")

    def forward(self, stream: Stream, batch: Batch) -> None:
        x = stream.norm(self.attn_norm).now()
        stream.replace(x)
        stream.scale(self.attn_scales[0])
        stream.add(self.attn(x, batch), self.attn_scales[1])
        x = stream.norm(self.mlp_norm).now()
        stream.replace(x)
        stream.scale(self.mlp_scales[0])
        stream.add(self.mlp(x), self.mlp_scales[1])


def _scales(config: Fields, name: str, published: str) -> tuple[float, float]:
    """Of the stream, and of what is added to it. `published`: the name in the published configs."""
    alpha = config.number(f"{name}_alpha_factor", f"layernorm_{published}_alpha", default=1.0)
    return alpha, config.number(f"{name}_beta_factor", f"layernorm_{published}_beta", default=1.0)
