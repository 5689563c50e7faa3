"""The tower of Kimi-K2.5. T patches, D width, F frequencies, M positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.kimi import KimiVision
from bough.layers.build import Build
from bough.layers.norm import make_norm
from bough.layers.tower import Learned, Normaliser, PatchEmbedding, Tower, TowerBlock, TowerInput, alone
from bough.models.qwen_tower import Merger, by_position, cut_patches

_BASE: Final = 10_000.0


class KimiTower(Tower):
    """A vision transformer over images of their own shapes. An item's grid is (frames, rows, columns) of patches; patches of
    a position lie next to one another."""

    def __init__(self, facts: KimiVision, build: Build) -> None:
        super().__init__()
        build = alone(build)
        hidden = facts.block.hidden
        self.facts = facts
        self.width = facts.out
        self.device = build.device
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build)
        self.patches = PatchEmbedding(facts.kernel, hidden, build, bias=True)
        self.positions = Learned((*facts.grid, hidden), build)
        self.blocks = nn.ModuleList(TowerBlock(facts.block, build) for _ in range(facts.depth))
        self.post_norm = make_norm(facts.block.norm, hidden, build)
        self.merger = Merger(hidden, facts.merge, facts.out, facts.projector_norm, build, norm_merged=False)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        facts, grids = self.facts, [(item.grid[0], item.grid[1], item.grid[2]) for item in items]
        cut = [
            cut_patches(self.normalise(item.features), patch=facts.patch, merge=facts.merge, temporal=1)
            for item in items
        ]
        x_TD = self.patches(torch.cat(cut)) + torch.cat([self._positions(*grid) for grid in grids])
        cos_sin_TR = torch.cat([self._angles(*grid) for grid in grids])
        lengths = [t * h * w for t, h, w in grids]
        for block in self.blocks:
            x_TD = block(x_TD, lengths, cos_sin_TR)
        frames = torch.split(self.post_norm(x_TD), lengths)
        means = [x.view(t, h * w, -1).mean(0) for x, (t, h, w) in zip(frames, grids, strict=True)]
        out_MW: Tensor = self.merger(torch.cat(means))
        return out_MW

    def _positions(self, t: int, h: int, w: int) -> Tensor:
        """[patches, D]: the grid of learned positions, stretched over a frame; in a run, with a wave for each frame."""
        grid = self.positions.weight.permute(2, 0, 1)[None].float()
        grid = F.interpolate(grid, (h, w), mode="bicubic", align_corners=False)[0].flatten(1).transpose(0, 1)
        frame = grid[by_position(torch.arange(h * w, device=self.device).view(h, w), self.facts.merge)]
        places = frame.repeat(t, 1)
        if t > 1:
            width = frame.shape[1]
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=self.device) / width
            angles = torch.arange(t, device=self.device)[:, None] * _BASE**-exponents
            places = places + torch.cat((angles.sin(), angles.cos()), -1).repeat_interleave(h * w, 0)
        return places.to(self.positions.weight.dtype)

    def _angles(self, t: int, h: int, w: int) -> Tensor:
        """[patches, width of a head]: columns and rows take turns."""
        half = self.facts.block.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=self.device) / half
        order = by_position(torch.arange(h * w, device=self.device).view(h, w), self.facts.merge)
        places = torch.stack((order % w, order // w), -1)
        angles_PF = (places[:, None, :] * (_BASE**-exponents)[:, None]).flatten(1)
        return torch.cat((angles_PF.cos(), angles_PF.sin()), -1).repeat(t, 1)
