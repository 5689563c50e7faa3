"""Granite 4's block."""

from __future__ import annotations

from torch import Tensor, nn

from bough.config.model_facts import Dense
from bough.layers.blocks import PreNormBlock
from bough.layers.parts import Parts
from bough.layers.stream import Input, Product


class GraniteHybridBlock(PreNormBlock):
    """Llama's, in which a dense block is the shared expert of no others, under its names."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        if isinstance(parts.layer(layer).ffn, Dense):
            self.mlp = SharedAlone(self.mlp)


class SharedAlone(nn.Module):
    """A shared expert without others."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Input) -> Product | Tensor:
        out: Product | Tensor = self.shared(x)
        return out
