"""Llama 3.2 Vision's tower: the tiles of an image as one sequence, blocks, an embedding of tiles, and gated blocks.

B images, G tiles of each, S tokens of a tile with padding, P without, T tokens of all, D width, N heads, H width of a head.

The model was trained with as many tiles as there may be, black where an image has fewer, and with padding behind each tile.
Tokens of tiles that are there see all of it; tokens of what is not there see only those, and are left out at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.mllama import NORM, MllamaVision
from bough.layers.build import Build
from bough.layers.linear import QKVLinear, ReplicatedLinear, RowLinear
from bough.layers.mlp import Mlp
from bough.layers.norm import make_norm
from bough.layers.stream import Product
from bough.layers.tower import Learned, Normaliser, PatchEmbedding, Tower, TowerInput, alone
from bough.memory.transfer import upload


@dataclass(frozen=True, slots=True)
class TileOrder:
    """Tokens of all images, in each of them those of tiles that are there first."""

    at_T: Tensor
    """int64: where each token is in [B, G, S]."""
    there: list[int]
    """By image: tokens of tiles that are there."""
    total: int
    """Tokens of an image, with those of tiles that are not there."""


def order_of(items: Sequence[TowerInput], facts: MllamaVision) -> TileOrder:
    at, size = [], facts.tiles * facts.padded
    for number, item in enumerate(items):
        place_GS = torch.arange(size, device=item.features.device).view(facts.tiles, facts.padded)
        is_there_GS = torch.zeros_like(place_GS, dtype=torch.bool)
        is_there_GS[: item.grid[0], : facts.tokens] = True
        at.append(torch.argsort(~is_there_GS.view(-1), stable=True) + number * size)
    return TileOrder(torch.cat(at), [item.grid[0] * facts.tokens for item in items], size)


class GatedTiles(nn.Module):
    """An embedding for each tile of each shape of images, through a gate."""

    def __init__(self, facts: MllamaVision, build: Build) -> None:
        super().__init__()
        self.shape = (facts.tiles, 1, facts.block.hidden)
        self.table = Learned((len(facts.shapes) + 1, facts.tiles * facts.block.hidden), build)
        self.gate = Learned((1,), build)

    def forward(self, shapes_B: Tensor) -> Tensor:
        """[B, G, 1, D]"""
        return self.table.weight[shapes_B].view(-1, *self.shape) * self.gate.weight.tanh()


class GatedPlaces(nn.Module):
    """An embedding of places in a tile, and one of places in an image of its shape: a gate weighs them."""

    def __init__(self, facts: MllamaVision, build: Build) -> None:
        super().__init__()
        hidden = facts.block.hidden
        self.shape = (facts.tiles, facts.tokens, hidden)
        self.in_tile = Learned((facts.tokens, hidden), build)
        self.in_image = Learned((len(facts.shapes) + 1, facts.tiles * facts.tokens * hidden), build)
        self.gate = Learned((1,), build)

    def forward(self, shapes_B: Tensor) -> Tensor:
        """[B, G, P, D]"""
        gate = self.gate.weight.tanh()
        return (1 - gate) * self.in_tile.weight + gate * self.in_image.weight[shapes_B].view(-1, *self.shape)


class MllamaTowerBlock(nn.Module):
    """Attention and feed-forward, each of the normed stream, through gates where it has them."""

    def __init__(self, facts: MllamaVision, build: Build, *, gated: bool) -> None:
        super().__init__()
        block = facts.block
        self.attn_norm = make_norm(block.norm, block.hidden, build)
        self.qkv = QKVLinear(block.hidden, block.num_heads, block.num_heads, block.head_dim, build)
        self.out = RowLinear(block.hidden, block.hidden, build)
        self.mlp_norm = make_norm(block.norm, block.hidden, build)
        self.mlp = Mlp(block.mlp, block.hidden, build)
        self.attn_gate = Learned((1,), build) if gated else None
        self.mlp_gate = Learned((1,), build) if gated else None

    def forward(self, x_TD: Tensor, order: TileOrder) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.qkv(self.attn_norm(x_TD))
        read = []
        images = (torch.split(each, order.total) for each in (q_TNH, k_TNH, v_TNH))
        for q, k, v, there in zip(*images, order.there, strict=True):
            read += [_attend(q[:there], k, v), _attend(q[there:], k[:there], v[:there])]
        x_TD = x_TD + _through(self.attn_gate, self.out.product(torch.cat(read)))
        product: Product = self.mlp(self.mlp_norm(x_TD))
        return x_TD + _through(self.mlp_gate, product.value())


def _attend(q_QNH: Tensor, k_KNH: Tensor, v_KNH: Tensor) -> Tensor:
    """[Q, N * H]: each query sees all keys."""
    q, k, v = (each.transpose(0, 1)[None] for each in (q_QNH, k_KNH, v_KNH))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def _through(gate: Learned | None, x_TD: Tensor) -> Tensor:
    return x_TD if gate is None else x_TD * gate.weight.tanh()


class MllamaTower(Tower):
    """An item's features are its tiles, uint8 [tiles, height, width, 3]; its grid is how many these are, and their rows
    and columns. Each token of a tile is a position."""

    def __init__(self, facts: MllamaVision, width: int, build: Build) -> None:
        super().__init__()
        build = alone(build)
        hidden = facts.block.hidden
        self.facts, self.width = facts, width
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build)
        self.patches = PatchEmbedding((3, facts.patch, facts.patch), hidden, build, bias=False)
        self.class_token = Learned((hidden,), build)
        self.places = GatedPlaces(facts, build)
        self.pre_tiles, self.post_tiles = GatedTiles(facts, build), GatedTiles(facts, build)
        self.pre_norm, self.post_norm = (make_norm(NORM, hidden, build) for _ in range(2))
        self.blocks = nn.ModuleList(MllamaTowerBlock(facts, build, gated=False) for _ in range(facts.depth))
        self.global_blocks = nn.ModuleList(
            MllamaTowerBlock(facts, build, gated=True) for _ in range(facts.global_depth)
        )
        self.project = ReplicatedLinear(facts.features, width, build, bias=True)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        facts, order = self.facts, order_of(items, self.facts)
        numbers = {shape: 1 + number for number, shape in enumerate(facts.shapes)}
        shapes_B = upload(np.array([numbers[item.grid[1], item.grid[2]] for item in items]), order.at_T.device)
        x_TD = self._begin(items, shapes_B).view(-1, facts.block.hidden)[order.at_T]
        taps = []
        for number, block in enumerate(self.blocks):
            x_TD = block(x_TD, order)
            if number in facts.taps:
                taps.append(_there(x_TD, order))
        tiles_BGSD = self.post_tiles(shapes_B).expand(-1, -1, facts.padded, -1)
        x_TD = self.post_norm(x_TD) + tiles_BGSD.reshape(-1, facts.block.hidden)[order.at_T]
        for block in self.global_blocks:
            x_TD = block(x_TD, order)
        deep = torch.stack(taps, -1).flatten(1)
        out_MW: Tensor = self.project(torch.cat([_there(x_TD, order), deep], -1))
        return out_MW

    def _begin(self, items: Sequence[TowerInput], shapes_B: Tensor) -> Tensor:
        """[B, G, S, D]: patches with their embeddings, normed, and padding."""
        facts = self.facts
        side, patch, hidden = facts.side, facts.patch, facts.block.hidden
        x_BGPD = self.class_token.weight.new_zeros(len(items), facts.tiles, facts.tokens, hidden)
        for x_GPD, item in zip(x_BGPD, items, strict=True):
            count = item.grid[0]
            cut = self.normalise(item.features).view(count, side, patch, side, patch, 3).permute(0, 1, 3, 5, 2, 4)
            x_GPD[:count, 1:] = self.patches(cut.reshape(count * side**2, -1)).view(count, side**2, hidden)
        x_BGPD[:, :, 1:] += self.pre_tiles(shapes_B)
        x_BGPD[:, :, 0] = self.class_token.weight
        x_BGPD = self.pre_norm(x_BGPD + self.places(shapes_B))
        return F.pad(x_BGPD, (0, 0, 0, facts.padded - facts.tokens))


def _there(x_TD: Tensor, order: TileOrder) -> Tensor:
    """Tokens of tiles that are there."""
    images = torch.split(x_TD, order.total)
    return torch.cat([x[:there] for x, there in zip(images, order.there, strict=True)])
