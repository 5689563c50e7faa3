"""The tower of GLM-4.1V. T patches, D width, M positions, W width of the language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import Dense
from bough.layers.build import Build
from bough.layers.embedding import Table
from bough.layers.linear import ReplicatedLinear
from bough.layers.mlp import GatedMlp
from bough.layers.norm import make_norm
from bough.layers.stream import Product
from bough.layers.tower import Normaliser, PatchEmbedding, Tower, TowerBlock, TowerInput, alone
from bough.models.glm4v import MERGED_NORM, GlmVision
from bough.models.qwen_tower import PatchPlans, by_position, cut_patches


class GlmMerger(nn.Module):
    """What a convolution made of a square of patches, on its way into the language model."""

    def __init__(self, facts: GlmVision, build: Build) -> None:
        super().__init__()
        out, block = facts.shapes.out, facts.shapes.block
        self.project = ReplicatedLinear(out, out, build)
        self.norm = make_norm(MERGED_NORM, out, build)
        self.mlp = GatedMlp(Dense(intermediate=facts.merger_inner, activation=block.mlp.activation), out, build)

    def forward(self, x_MW: Tensor) -> Tensor:
        product: Product = self.mlp(F.gelu(self.norm(self.project(x_MW))))
        return product.value()


class GlmTower(Tower):
    """A vision transformer over images of their own shapes."""

    def __init__(self, facts: GlmVision, build: Build) -> None:
        super().__init__()
        build = alone(build)
        shapes = facts.shapes
        hidden = shapes.block.hidden
        self.shapes = shapes
        self.width = shapes.out
        self.device = build.device
        self.normalise = Normaliser(shapes.image.mean, shapes.image.std, shapes.image.rescale, build)
        self.patches = PatchEmbedding(shapes.kernel, hidden, build, bias=True)
        self.pre_norm = make_norm(shapes.block.norm, hidden, build)
        self.positions = Table(shapes.grid_side**2, hidden, build)
        self.blocks = nn.ModuleList(TowerBlock(shapes.block, build) for _ in range(shapes.depth))
        self.post_norm = make_norm(shapes.block.norm, hidden, build)
        self.downsample = PatchEmbedding((hidden, shapes.merge, shapes.merge), shapes.out, build, bias=True)
        self.merger = GlmMerger(facts, build)
        self.plans = PatchPlans(shapes, self.device)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        shapes, grids = self.shapes, [item.grid[:3] for item in items]
        sizes = {"patch": shapes.patch, "merge": shapes.merge, "temporal": shapes.temporal}
        patches = torch.cat([cut_patches(self.normalise(item.features), **sizes) for item in items])
        plan = self.plans.of(grids)
        x_TD = self.pre_norm(self.patches(patches))
        x_TD = x_TD + torch.cat([self._learned_positions(h, w).repeat(t, 1) for t, h, w in grids])
        for block in self.blocks:
            x_TD = block(x_TD, plan.lengths, plan.cos_sin_TR)
        squares = self.post_norm(x_TD).view(-1, shapes.merge**2, shapes.block.hidden).transpose(1, 2)
        out_MW: Tensor = self.merger(self.downsample(squares.flatten(1)))
        return out_MW

    def _learned_positions(self, h: int, w: int) -> Tensor:
        """[patches of a frame, D]: the grid of learned positions, stretched over `h x w` patches."""
        table, side = self.positions.weight, self.shapes.grid_side
        grid = table.view(side, side, -1).permute(2, 0, 1)[None].float()
        rows, columns = ((torch.arange(size, device=table.device) + 0.5) / size * 2 - 1 for size in (h, w))
        at = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1)[None]
        found = F.grid_sample(grid, at, mode="bicubic", align_corners=False, padding_mode="border")[0]
        order = by_position(torch.arange(h * w, device=table.device).view(h, w), self.shapes.merge)
        return found.flatten(1).transpose(0, 1)[order].to(table.dtype)
