"""GPTQ: columns are rounded one after the other, and those that are left make up for what the outputs lost.

Groups keep their place and their grid, whatever the order in which columns are taken (compressed-tensors calls this
`actorder: weight`), so that a kernel sees nothing of it. O rows, D columns.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from bough.compress.grid import Grid

_log = logging.getLogger(__name__)

_BLOCK = 128
"""Columns after which those behind are brought up to date."""
_DAMPING = (0.01, 0.05, 0.25, 1.0)
"""Of the Gram matrix's mean diagonal, added to it: the first that makes it invertible."""


def rounded_in_turn(weight_OD: Tensor, gram_DD: Tensor, grid: Grid) -> Tensor:
    """float32 [O, D]: weights on the grid, chosen so that outputs change little for inputs like those of the Gram matrix."""
    diagonal = gram_DD.diagonal()
    order = torch.argsort(diagonal, descending=True)
    weight = weight_OD[:, order].clone()
    weight[:, diagonal[order] == 0] = 0  # no input was ever seen there
    inverse = _inverse_root(gram_DD[order][:, order])
    if inverse is None:
        _log.warning("the Gram matrix of a layer's inputs is singular: its weights are rounded to the nearest code")
        return grid.rounded(weight_OD)
    out = torch.empty_like(weight)
    num_cols, top = weight.shape[1], (1 << grid.bits) - 1
    for first in range(0, num_cols, _BLOCK):
        last = min(first + _BLOCK, num_cols)
        scale, zero = grid.columns(order[first:last])
        scale = scale.clamp(min=torch.finfo(grid.scale_OG.dtype).tiny)
        block, errors = weight[:, first:last], torch.empty_like(weight[:, first:last])
        upper = inverse[first:last, first:last]
        for at in range(last - first):
            value = block[:, at]
            code = (value / scale[:, at] + zero[:, at]).round().clamp(0, top)
            kept = (code - zero[:, at]) * scale[:, at]
            out[:, first + at] = kept
            errors[:, at] = (value - kept) / upper[at, at]
            block[:, at + 1 :] -= errors[:, at, None] * upper[at, at + 1 :]
        weight[:, last:] -= errors @ inverse[first:last, last:]
    return out[:, torch.argsort(order)]


def _inverse_root(gram_DD: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse; None where even a large damping does not make that possible."""
    diagonal = gram_DD.diagonal()
    mean = diagonal.mean()
    for damping in _DAMPING:
        damped = gram_DD.clone()
        damped.diagonal().add_(damping * mean)
        damped.diagonal()[diagonal == 0] = 1.0
        factor, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            continue
        root: Tensor
        root, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not int(failed):
            return root
    return None
