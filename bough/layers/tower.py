"""Towers: encoders that turn pixels (or sound) into embeddings of a language model, and the parts that they share.

Tokens of all items of a step lie one behind the other, without padding: T tokens, D width of the tower, N heads, H width of
a head. Every rank holds a whole tower: splitting one gains little, since whole items can be spread over ranks instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.tower_facts import TowerBlockFacts
from bough.distributed.mesh import SINGLE
from bough.kernels.rotary import apply_rope
from bough.kernels.segment_attention import attend_segments
from bough.layers.build import Build
from bough.layers.linear import QKVLinear, RowLinear
from bough.layers.mlp import GatedMlp, Mlp
from bough.layers.norm import make_norm
from bough.layers.stream import Product
from bough.weights.slots import Slot
from bough.weights.stored import Stored


class TowerInput(NamedTuple):
    """An item as a processor has prepared it."""

    features: Tensor
    """On the device. Pixels are uint8 [..., height, width, 3]."""
    grid: tuple[int, ...]
    """As `core.media.MediaItem.grid`."""


class Tower(nn.Module):
    """What every family's tower offers."""

    width: int
    """Values that it gives for each position: as `TowerFacts.width`."""

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        """[positions of all items, width], item after item."""
        raise NotImplementedError


def alone(build: Build) -> Build:
    """The build of layers that every rank holds whole."""
    return replace(build, mesh=SINGLE, spread=None)


class TowerAttention(nn.Module):
    """Attention of tokens that lie in segments of `lengths`; rotated if the tower has a line of a table for each."""

    def __init__(self, facts: TowerBlockFacts, build: Build) -> None:
        super().__init__()
        heads = (facts.num_heads, facts.num_heads, facts.head_dim)
        self.qkv = QKVLinear(facts.hidden, *heads, build, bias=facts.qkv_bias, k_bias=facts.k_bias)
        self.out = RowLinear(facts.hidden, facts.hidden, build, bias=facts.out_bias)
        self.scale = facts.head_dim**-0.5
        self.interleaved = facts.interleaved

    def forward(self, x_TD: Tensor, lengths: Sequence[int], cos_sin_TR: Tensor | None) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.qkv(x_TD)
        if cos_sin_TR is not None:
            places_T = _places(len(x_TD), x_TD.device)
            q_TNH, k_TNH = apply_rope(q_TNH, k_TNH, places_T, cos_sin_TR, interleaved=self.interleaved)
        return self.out.product(attend_segments(q_TNH, k_TNH, v_TNH, lengths, self.scale))


@lru_cache(maxsize=4)
def _places(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1. Kept, because all layers of a pass ask for the same."""
    return torch.arange(count, device=device)


class TowerBlock(nn.Module):
    """Attention and feed-forward, each of the normed stream."""

    def __init__(self, facts: TowerBlockFacts, build: Build) -> None:
        super().__init__()
        self.attn_norm = make_norm(facts.norm, facts.hidden, build)
        self.attn = TowerAttention(facts, build)
        self.mlp_norm = make_norm(facts.norm, facts.hidden, build)
        self.mlp = (GatedMlp if facts.mlp.gated else Mlp)(facts.mlp, facts.hidden, build)
        self.attn_scale = Learned((facts.hidden,), build) if facts.scaled else None
        self.mlp_scale = Learned((facts.hidden,), build) if facts.scaled else None

    def forward(self, x_TD: Tensor, lengths: Sequence[int], cos_sin_TR: Tensor | None) -> Tensor:
        added_TD = self.attn(self.attn_norm(x_TD), lengths, cos_sin_TR)
        if self.attn_scale is not None:
            added_TD = added_TD * self.attn_scale.weight
        normed_TD, x_TD = self.mlp_norm.add(added_TD, x_TD)
        product: Product = self.mlp(normed_TD)
        added_TD = product.value()
        return x_TD + (added_TD if self.mlp_scale is None else added_TD * self.mlp_scale.weight)


class Learned(nn.Module):
    """A tensor that a checkpoint holds alone: a vector, a table of positions."""

    def __init__(self, shape: tuple[int, ...], build: Build) -> None:
        super().__init__()
        self.weight = _parameter(shape, build)

    def slots(self) -> dict[str, Slot]:
        shape = tuple(self.weight.shape)
        return {"weight": Slot(shape, partial(_fill_flat, self.weight), also=((1, *shape), (1, 1, *shape)))}


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its size: a product of each patch's values."""

    def __init__(self, kernel: tuple[int, ...], hidden: int, build: Build, *, bias: bool) -> None:
        """`kernel`: channels, then the sizes of a patch, in the order of the stored weight."""
        super().__init__()
        self.kernel = kernel
        values = 1
        for size in kernel:
            values *= size
        self.weight = _parameter((hidden, values), build)
        self.bias = _parameter((hidden,), build) if bias else None

    def slots(self) -> dict[str, Slot]:
        shape = (self.weight.shape[0], *self.kernel)
        slots = {"weight": Slot(shape, partial(_fill_flat, self.weight), also=(tuple(self.weight.shape),))}
        if self.bias is not None:
            slots["bias"] = Slot(tuple(self.bias.shape), partial(_fill_flat, self.bias))
        return slots

    def forward(self, patches_TV: Tensor) -> Tensor:
        return F.linear(patches_TV.to(self.weight.dtype), self.weight, self.bias)


class Normaliser(nn.Module):
    """uint8 pixels to what a tower was trained on: (x / 255 - mean) / deviation."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        rescale: float,
        build: Build,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype`: what it is computed in."""
        super().__init__()
        to = {"dtype": dtype, "device": build.device}
        self.dtype = dtype
        self.rescale = rescale
        self.register_buffer("mean", torch.tensor(mean, **to), persistent=False)  # type: ignore[arg-type]
        self.register_buffer("std", torch.tensor(std, **to), persistent=False)  # type: ignore[arg-type]

    def forward(self, pixels: Tensor) -> Tensor:
        """float32 of the same shape, [..., 3]."""
        return ((pixels.to(self.dtype) * self.rescale - self.mean) / self.std).float()  # type: ignore[operator]


def _parameter(shape: tuple[int, ...], build: Build) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device), requires_grad=False)


def _fill_flat(target: Tensor, stored: Stored) -> None:
    target.copy_(stored.read(0, stored.shape[0]).reshape(target.shape))
