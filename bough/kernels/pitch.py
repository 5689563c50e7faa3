"""Matrices whose rows begin where products on a GPU can fetch them in one piece."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. If the rows of a factor begin elsewhere (3,420 values of 2 bytes each), the vendor's library can't use the copy
engine and takes kernels of an earlier generation."""


def empty_rows(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised [rows, cols]. On a GPU each row begins at a multiple of 16 bytes, so that the matrix may be a view of
    a wider one; elsewhere it is contiguous."""
    per_piece = ALIGNMENT // dtype.itemsize
    if device.type != "cuda" or cols % per_piece == 0:
        return torch.empty(rows, cols, dtype=dtype, device=device)
    return torch.empty(rows, -(-cols // per_piece) * per_piece, dtype=dtype, device=device)[:, :cols]
