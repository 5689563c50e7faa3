"""Matrices whose rows begin where products on a GPU can fetch them in one piece, with zeros behind each row."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. If the rows of a factor begin elsewhere (3,420 values of 2 bytes each), or their length is no multiple of it, the
vendor's library can't use the copy engine and takes kernels of an earlier generation."""


def empty_rows(rows: int, cols: int, dtype: torch.dtype, device: torch.device, *, zeros: bool = True) -> Tensor:
    """An uninitialised [rows, cols]. On a GPU each row begins at a multiple of 16 bytes, so that the matrix may be a view of
    a wider one, with zeros behind each row; elsewhere it is contiguous. Without `zeros` the caller writes those."""
    per_piece = ALIGNMENT // dtype.itemsize
    if device.type != "cuda" or cols % per_piece == 0:
        return torch.empty(rows, cols, dtype=dtype, device=device)
    wide = torch.empty(rows, -(-cols // per_piece) * per_piece, dtype=dtype, device=device)
    if zeros:
        wide[:, cols:].zero_()
    return wide[:, :cols]


def whole_rows(x_TD: Tensor, weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of a product with the zeros behind their rows, if both come from `empty_rows` and have some: the product
    is the same, and its depth is a multiple of 16 bytes. Otherwise the factors as they are."""
    depth, pitch = x_TD.shape[-1], x_TD.stride(0)
    if x_TD.dim() != 2 or weight_OD.stride() != (pitch, 1) or x_TD.stride(1) != 1:
        return x_TD, weight_OD
    if not 0 < pitch - depth < ALIGNMENT // x_TD.element_size():
        return x_TD, weight_OD
    return x_TD.as_strided((x_TD.shape[0], pitch), (pitch, 1)), weight_OD.as_strided(
        (weight_OD.shape[0], pitch), (pitch, 1)
    )
