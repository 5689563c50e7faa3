"""Blocks of towers, as a config describes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bough.config.image_facts import ImageFacts
from bough.config.model_facts import Dense, NormFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerBlockFacts:
    """A pre-norm block: attention within an item, then a feed-forward part."""

    hidden: int
    num_heads: int
    norm: NormFacts
    mlp: Dense
    qkv_bias: bool = True
    out_bias: bool = True
    k_bias: bool = True
    """If there is a bias: whether the checkpoint has one for keys, too."""
    scaled: bool = False
    """The output of attention and of the feed-forward part is multiplied by a learned vector (layer scale)."""
    interleaved: bool = False
    """With rotary positions: adjacent values form a pair, instead of values half a head apart."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    def num_parameters(self) -> int:
        biases = (3 * self.hidden if self.qkv_bias else 0) + (self.hidden if self.out_bias else 0)
        norms = 2 * self.norm.num_parameters(self.hidden)
        scales = 2 * self.hidden if self.scaled else 0
        return 4 * self.hidden * self.hidden + biases + norms + scales + self.mlp.num_parameters(self.hidden)

    @property
    def values_per_token(self) -> int:
        """Values of a token at the widest point: the stream, its norm and what a half makes of it."""
        return 3 * self.hidden + max(5 * self.hidden, 3 * self.mlp.intermediate)


@dataclass(frozen=True, slots=True, kw_only=True)
class VitFacts:
    """A vision transformer over squares (tiles) of one size, with learned positions."""

    block: TowerBlockFacts
    depth: int
    """Number of blocks in the checkpoint."""
    used: int
    """Number of blocks that are computed; the features are the output of the last one."""
    patch: int
    side: int
    """Patches along a side of a tile."""
    image: ImageFacts
    channels: int = 3
    patch_bias: bool = True
    class_token: bool = False
    """There is a class token before the patches. It is not part of the features."""
    class_last: bool = False
    """The class token is after the patches instead."""
    theta: float = 0.0
    """Base of 2D rotary positions: half of the pairs by column, half by row. 0: none."""
    coarse_pixels: bool = False
    """Pixels are scaled and normalised in bfloat16."""
    pre_norm: NormFacts | None = None
    post_norm: NormFacts | None = None
    post_used: bool = True
    """Whether features are normed; otherwise the norm is in the checkpoint only."""

    @property
    def kernel(self) -> tuple[int, ...]:
        return (self.channels, self.patch, self.patch)

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.side**2 + self.class_token

    def num_parameters(self) -> int:
        hidden = self.block.hidden
        patches = math.prod(self.kernel) * hidden + (hidden if self.patch_bias else 0)
        norms = sum(norm.num_parameters(hidden) for norm in (self.pre_norm, self.post_norm) if norm is not None)
        learned = self.tokens * hidden + (hidden if self.class_token else 0)
        return patches + learned + norms + self.depth * self.block.num_parameters()

    @property
    def values_per_token(self) -> int:
        return self.block.values_per_token + math.prod(self.kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class NaflexFacts:
    """A vision transformer over images that keep their aspect ratio, with learned positions resized to each (SigLIP
    2)."""

    block: TowerBlockFacts
    depth: int
    patch: int
    side: int
    """Learned positions along a side of their square."""
    most_patches: int
    """Default maximum number of patches of an image."""
    image: ImageFacts
    channels: int = 3

    @property
    def kernel(self) -> tuple[int, ...]:
        return (self.patch, self.patch, self.channels)

    def num_parameters(self) -> int:
        hidden = self.block.hidden
        ends = (math.prod(self.kernel) + 1 + self.side**2) * hidden + self.block.norm.num_parameters(hidden)
        return ends + self.depth * self.block.num_parameters()

    @property
    def values_per_token(self) -> int:
        return self.block.values_per_token + math.prod(self.kernel)


def attention_pool_parameters(block: TowerBlockFacts) -> int:
    """Number of parameters of `layers.image_embedder.AttentionPool`."""
    hidden = block.hidden
    attention = 4 * hidden * hidden + 5 * hidden
    return attention + block.norm.num_parameters(hidden) + block.mlp.num_parameters(hidden)
