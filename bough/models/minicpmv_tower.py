"""The tower of MiniCPM-V 4.6. T patches, D width, W width of the language model, M positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.minicpmv import LAST_NORM, WINDOW, MiniCpmVision
from bough.config.tower_facts import VitFacts
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import make_norm
from bough.layers.tower import Tower, TowerAttention, TowerInput, alone
from bough.layers.vit import Vit, nearest_places
from bough.models.qwen_tower import Merger


class WindowMerger(nn.Module):
    """Attention within windows of neighbouring patches, which lie one behind the other; then each window as wide as a patch,
    added to the mean of its patches."""

    def __init__(self, facts: VitFacts, build: Build) -> None:
        super().__init__()
        hidden, wide = facts.block.hidden, facts.block.hidden * WINDOW**2
        inner = facts.block.mlp.intermediate * WINDOW**2
        self.attn_norm = make_norm(facts.block.norm, hidden, build)
        self.attn = TowerAttention(facts.block, build)
        self.norm = make_norm(facts.block.norm, wide, build)
        self.up = ReplicatedLinear(wide, inner, build, bias=True)
        self.down = ReplicatedLinear(inner, hidden, build, bias=True)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[windows, D]"""
        size = WINDOW**2
        x_TD = x_TD + self.attn(self.attn_norm(x_TD), [size] * (len(x_TD) // size), None)
        windows = x_TD.view(-1, size, x_TD.shape[-1])
        out: Tensor = self.down(F.gelu(self.up(self.norm(windows.flatten(1))), approximate="tanh"))
        return out + windows.mean(1)


class MiniCpmTower(Tower):
    """An item's features are patches [rows x columns, patch, patch, 3], its grid is (rows, columns)."""

    def __init__(self, facts: MiniCpmVision, build: Build) -> None:
        super().__init__()
        build = alone(build)
        self.facts = facts
        self.width = facts.out
        self.device = build.device
        self.vit = Vit(facts.vit, build)
        self.windows = WindowMerger(facts.vit, build)
        merger = Merger(facts.vit.block.hidden, WINDOW, facts.out, LAST_NORM, build, norm_merged=True)
        self.mergers = nn.ModuleList([merger])
        """By the number that checkpoints give it: it is one."""

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        side = self.facts.vit.side
        grids = [(item.grid[0], item.grid[1]) for item in items]
        orders = [self._order(*grid) for grid in grids]
        pixels = torch.cat([item.features[order] for item, order in zip(items, orders, strict=True)])
        places = [nearest_places(*grid, side, self.device).flatten() for grid in grids]
        x_TD = self.vit.embed(pixels, torch.cat([p[order] for p, order in zip(places, orders, strict=True)]))
        lengths = [len(order) for order in orders]
        for number, block in enumerate(self.vit.blocks):
            x_TD = block(x_TD, lengths, None)
            if number == self.facts.insert:
                x_TD, lengths = self.windows(x_TD), [length // WINDOW**2 for length in lengths]
        assert self.vit.post_norm is not None, "SigLIP has one"
        out_MW: Tensor = self.mergers[0](self.vit.post_norm(x_TD))
        return out_MW

    def _order(self, h: int, w: int) -> Tensor:
        """Patches of a position together, and within it those of a window."""
        places, outer = torch.arange(h * w, device=self.device), self.facts.by // WINDOW
        grid = places.view(h // self.facts.by, outer, WINDOW, w // self.facts.by, outer, WINDOW)
        return grid.permute(0, 3, 1, 4, 2, 5).flatten()
