"""Towers that make one vector of an image, in the space of a text encoder's (CLIP, SigLIP). T tokens of all images, I
images, D width, N heads, H width of a head, W width of the vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.tower_facts import NaflexFacts, TowerBlockFacts, VitFacts
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.mlp import Mlp
from bough.layers.norm import make_norm
from bough.layers.stream import Product
from bough.layers.tower import Learned, Normaliser, PatchEmbedding, Tower, TowerBlock, TowerInput, alone
from bough.layers.vit import Vit


class ImageEmbedder(Tower):
    """A vision transformer over images of one size, and what pools its tokens."""

    def __init__(self, facts: VitFacts, pool: nn.Module, width: int, build: Build) -> None:
        """`pool`: tokens of all images [T, D] and their number in each -> [I, W]."""
        super().__init__()
        self.width = width
        self.vit = Vit(facts, alone(build))
        self.pool = pool

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        x_ISD = self.vit.tokens(torch.cat([item.features for item in items]))
        out_IW: Tensor = self.pool(x_ISD.flatten(0, 1), [x_ISD.shape[1]] * len(x_ISD))
        return out_IW


class NaflexVit(nn.Module):
    """A vision transformer over images of their own shapes: learned positions are resized to each grid of patches."""

    def __init__(self, facts: NaflexFacts, build: Build) -> None:
        super().__init__()
        hidden = facts.block.hidden
        self.facts = facts
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build)
        self.patches = PatchEmbedding(facts.kernel, hidden, build, bias=True)
        self.positions = Learned((facts.side**2, hidden), build)
        self.blocks = nn.ModuleList(TowerBlock(facts.block, build) for _ in range(facts.depth))
        self.post_norm = make_norm(facts.block.norm, hidden, build)

    def forward(self, items: Sequence[TowerInput]) -> tuple[Tensor, list[int]]:
        """[T, D], image after image, and how many tokens each has. Grids are rows and columns of patches, features are
        pixels, or [patches, patch, patch, 3]."""
        patch = self.facts.patch
        cut, places, lengths = [], [], []
        for pixels, (rows, columns) in items:
            squares = self.normalise(pixels)
            if squares.dim() == 3:
                squares = squares.view(rows, patch, columns, patch, -1).transpose(1, 2)
            cut.append(squares.reshape(rows * columns, -1))
            places.append(self._positions(rows, columns))
            lengths.append(rows * columns)
        x_TD = self.patches(torch.cat(cut)) + torch.cat(places)
        for block in self.blocks:
            x_TD = block(x_TD, lengths, None)
        return self.post_norm(x_TD), lengths

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[rows x columns, D]"""
        table, side = self.positions.weight, self.facts.side
        grid = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        fitted = F.interpolate(grid, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return fitted[0].flatten(1).T.to(table.dtype)


class NaflexEmbedder(Tower):
    """An `ImageEmbedder` over images of their own shapes (SigLIP 2)."""

    def __init__(self, facts: NaflexFacts, build: Build) -> None:
        super().__init__()
        self.width = facts.block.hidden
        self.vit = NaflexVit(facts, alone(build))
        self.pool = AttentionPool(facts.block, build)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        out_ID: Tensor = self.pool(*self.vit(items))
        return out_ID


class ClassToken(nn.Module):
    """The token before the patches, projected (CLIP)."""

    def __init__(self, hidden: int, width: int, build: Build) -> None:
        super().__init__()
        self.project = ReplicatedLinear(hidden, width, alone(build))

    def forward(self, x_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        out_IW: Tensor = self.project(x_TD.view(len(lengths), lengths[0], -1)[:, 0])
        return out_IW


class AttentionPool(nn.Module):
    """What a learned query reads of all tokens of an image, and a feed-forward block over it (SigLIP)."""

    def __init__(self, facts: TowerBlockFacts, build: Build) -> None:
        super().__init__()
        build = alone(build)
        hidden = facts.hidden
        self.heads = facts.num_heads
        self.query = Learned((hidden,), build)
        self.qkv_weight = Learned((3 * hidden, hidden), build)
        self.qkv_bias = Learned((3 * hidden,), build)
        self.out = ReplicatedLinear(hidden, hidden, build, bias=True)
        self.norm = make_norm(facts.norm, hidden, build)
        self.mlp = Mlp(facts.mlp, hidden, build)

    def forward(self, x_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden = x_TD.shape[1]
        weight, bias = self.qkv_weight.weight, self.qkv_bias.weight
        q_NH = F.linear(self.query.weight, weight[:hidden], bias[:hidden]).view(self.heads, -1)
        kv_TNH = F.linear(x_TD, weight[hidden:], bias[hidden:]).view(len(x_TD), 2, self.heads, -1)
        read_ID = _read_each(q_NH.float(), kv_TNH[:, 0].float(), kv_TNH[:, 1].float(), lengths).flatten(1)
        x_ID: Tensor = self.out(read_ID.to(x_TD.dtype))
        added: Product = self.mlp(self.norm(x_ID))
        return x_ID + added.value()


def _read_each(q_NH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int]) -> Tensor:
    """[I, N, H]: what one query reads in each segment. Segments may differ in length: nothing is padded."""
    device, count = k_TNH.device, len(lengths)
    sizes = torch.tensor(lengths, device=device)
    image_T = torch.repeat_interleave(torch.arange(count, device=device), sizes, output_size=len(k_TNH))
    scores_TN = (k_TNH * q_NH).sum(-1) * q_NH.shape[1] ** -0.5
    top_IN = scores_TN.new_full((count, q_NH.shape[0]), float("-inf"))
    top_IN.scatter_reduce_(0, image_T[:, None].expand(scores_TN.shape), scores_TN, "amax")
    weight_TN = torch.exp(scores_TN - top_IN[image_T])
    total_IN = torch.zeros_like(top_IN).index_add_(0, image_T, weight_TN)
    read_INH = v_TNH.new_zeros(count, *q_NH.shape).index_add_(0, image_T, weight_TN[..., None] * v_TNH)
    return read_INH / total_IN[..., None]
