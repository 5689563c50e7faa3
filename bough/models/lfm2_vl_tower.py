"""The tower of LFM2-VL. T patches, D width, M positions, W width of the language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.config.lfm2_vl import PROJECTOR_NORM, Lfm2Vision
from bough.layers.build import Build
from bough.layers.image_embedder import NaflexVit
from bough.layers.projectors import TwoLinears
from bough.layers.tower import Tower, TowerInput, alone


class Lfm2VlTower(Tower):
    """An item's features are patches [rows x columns, patch, patch, 3], its grid begins with (rows, columns)."""

    def __init__(self, facts: Lfm2Vision, build: Build) -> None:
        super().__init__()
        build = alone(build)
        self.by = facts.by
        self.width = facts.out
        self.vit = NaflexVit(facts.vit, build)
        self.project = TwoLinears(
            (facts.vit.block.hidden * facts.by**2, facts.out),
            build,
            activation=facts.activation,
            bias=facts.bias,
            norm=PROJECTOR_NORM if facts.norm else None,
            between=facts.between,
        )

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        grids = [item.grid[:2] for item in items]
        x_TD, lengths = self.vit([item._replace(grid=grid) for item, grid in zip(items, grids, strict=True)])
        parts = zip(torch.split(x_TD, lengths), grids, strict=True)
        out_MW: Tensor = self.project(torch.cat([self._joined(part, *grid) for part, grid in parts]))
        return out_MW

    def _joined(self, x_TD: Tensor, rows: int, columns: int) -> Tensor:
        """[M, by^2 x D]: squares of neighbours together, row after row."""
        squares = x_TD.view(rows // self.by, self.by, columns // self.by, self.by, -1).transpose(1, 2)
        return squares.reshape(len(x_TD) // self.by**2, -1)
