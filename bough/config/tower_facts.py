"""Blocks of towers, as a config describes them."""

from __future__ import annotations

from dataclasses import dataclass

from bough.config.model_facts import Dense, NormFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerBlockFacts:
    """Attention within an item, then a feed-forward block, each of the normed stream."""

    hidden: int
    num_heads: int
    norm: NormFacts
    mlp: Dense
    qkv_bias: bool = True
    out_bias: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    def num_parameters(self) -> int:
        biases = (3 * self.hidden if self.qkv_bias else 0) + (self.hidden if self.out_bias else 0)
        norms = 2 * self.norm.num_parameters(self.hidden)
        return 4 * self.hidden * self.hidden + biases + norms + self.mlp.num_parameters(self.hidden)

    @property
    def values_per_token(self) -> int:
        """Values of a token at the widest point: the stream, its norm and what a half makes of it."""
        return 3 * self.hidden + max(5 * self.hidden, 3 * self.mlp.intermediate)
