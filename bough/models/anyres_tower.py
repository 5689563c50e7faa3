"""The tower of LLaVA-NeXT and OneVision: the whole image, then rows of all tiles together, a learned vector behind each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.anyres import margins, shrunk
from bough.config.tower_facts import VitFacts
from bough.layers.build import Build
from bough.layers.tower import Learned, TowerInput, alone
from bough.layers.vit import TiledTower


class AnyresTower(TiledTower):
    """An item's grid: tiles (the whole image first), rows and columns of the others, height and width of the image. Of a
    frame of a video: 1, and whether it is the last."""

    def __init__(self, facts: VitFacts, project: nn.Module, width: int, build: Build, *, most_tiles: int) -> None:
        """`most_tiles`: as `config.anyres.shrunk`."""
        super().__init__(facts, project, width, build)
        self.side = facts.side
        self.most_tiles = most_tiles
        self.row_end = Learned((width,), alone(build))

    def pack(self, features_NMW: Tensor, items: Sequence[TowerInput]) -> Tensor:
        parts: list[Tensor] = []
        for item, tiles_NMW in zip(items, torch.split(features_NMW, [each.grid[0] for each in items]), strict=True):
            if len(item.grid) == 2:
                parts += [self._pooled(tiles_NMW), *([self.row_end.weight[None]] if item.grid[1] else [])]
                continue
            _, rows, columns, height, width = item.grid
            parts.append(tiles_NMW[0])
            if rows:
                parts.append(self._canvas(tiles_NMW[1:], rows, columns, height, width))
            else:
                parts.append(self.row_end.weight[None])
        return torch.cat(parts)

    def _pooled(self, frame_NMW: Tensor) -> Tensor:
        """A frame in half of its rows and columns."""
        half = -(-self.side // 2)
        grid = frame_NMW[0].view(self.side, self.side, -1).permute(2, 0, 1)[None]
        return F.interpolate(grid, (half, half), mode="bilinear")[0].flatten(1).transpose(0, 1)

    def _canvas(self, tiles_NMW: Tensor, rows: int, columns: int, height: int, width: int) -> Tensor:
        side = self.side
        grid = tiles_NMW.view(rows, columns, side, side, -1).permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)
        above, beside = margins(grid.shape[1], grid.shape[2], height, width)
        grid = grid[:, above : grid.shape[1] - above, beside : grid.shape[2] - beside]
        size = shrunk(grid.shape[1], grid.shape[2], side, self.most_tiles)
        if size != tuple(grid.shape[1:]):
            grid = F.interpolate(grid[None], size, mode="bilinear")[0]
        ends = self.row_end.weight[:, None, None].expand(-1, grid.shape[1], 1).to(grid.dtype)
        return torch.cat([grid, ends], -1).flatten(1).transpose(0, 1)
