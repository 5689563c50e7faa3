"""Grids of integers for groups of columns, and the error of rounding to them. O rows, D columns, G groups of a row.

The Gram matrix [D, D] of a layer is the sum of x x' over the inputs that it saw: a change `delta` of its weights changes its
outputs by `delta gram delta'`, summed over those inputs. Within groups that is cheap enough to be searched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.kernels.packed_linear import Codes
from bough.quantization.quantise import codes_on_grid, int_grid

_SHRINK = tuple(1 - 0.04 * step for step in range(13))
"""How much of a group's range the grid covers: from all of it to about half."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Integers of `bits` with a scale and a zero point for each `group` columns."""

    bits: int
    group: int
    scale_OG: Tensor
    """As it is stored: float16 or bfloat16."""
    zero_OG: Tensor

    def columns(self, at_C: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [O, C]: scales and zero points of some columns."""
        groups = at_C // self.group
        return self.scale_OG.float()[:, groups], self.zero_OG[:, groups]

    def nearest(self, weight_OD: Tensor) -> Codes:
        """The codes nearest to a weight."""
        codes = codes_on_grid(weight_OD, self._scale, self.zero_OG, self.bits, self.group)
        return replace(codes, scale_OG=self.scale_OG)

    def rounded(self, weight_OD: Tensor) -> Tensor:
        """float32 [O, D]: what `nearest` is worth."""
        grouped = weight_OD.view(weight_OD.shape[0], -1, self.group)
        scale, zero = self._scale[..., None], self.zero_OG[..., None]
        codes = (grouped / scale + zero).round().clamp(0, (1 << self.bits) - 1)
        return ((codes - zero) * scale).view(weight_OD.shape)

    @property
    def _scale(self) -> Tensor:
        return self.scale_OG.float().clamp(min=torch.finfo(self.scale_OG.dtype).tiny)


def plain_grid(weight_OD: Tensor, bits: int, group: int, dtype: torch.dtype) -> Grid:
    """The smallest grids that hold every group."""
    scale, zero = int_grid(weight_OD, bits, group, symmetric=False)
    return Grid(bits, group, scale.to(dtype), zero)


def clipped_grid(weight_OD: Tensor, gram_DD: Tensor, bits: int, group: int, dtype: torch.dtype) -> Grid:
    """Grids that may be too small for a group's largest weights, if what the outputs lose by that is less than what a finer
    grid gains."""
    num_rows, num_cols = weight_OD.shape
    blocks = torch.stack([gram_DD[at : at + group, at : at + group] for at in range(0, num_cols, group)])
    top = (1 << bits) - 1
    grouped = weight_OD.view(num_rows, -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    chosen = plain_grid(weight_OD, bits, group, dtype)
    scale_OG, zero_OG = chosen.scale_OG, chosen.zero_OG
    for shrink in _SHRINK:
        scale = ((high - low) * shrink / top).clamp(min=1e-12).to(dtype)
        zero = (-low * shrink / scale.float().clamp(min=torch.finfo(dtype).tiny)).round().clamp(0, top)
        delta = (Grid(bits, group, scale, zero).rounded(weight_OD) - weight_OD).view(num_rows, -1, group)
        error = ((delta.transpose(0, 1) @ blocks).transpose(0, 1) * delta).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scale_OG, zero_OG = torch.where(better, scale, scale_OG), torch.where(better, zero, zero_OG)
    return Grid(bits, group, scale_OG, zero_OG)


def output_error(delta_OD: Tensor, gram_DD: Tensor) -> float:
    """By how much a change of weights changes outputs, squared and summed."""
    return float(((delta_OD @ gram_DD) * delta_OD).sum())
