"""Few tokens against weights as the checkpoint has them: each weight is read once, at the memory's speed."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bough.kernels.activation import silu_mul
from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES

MAX_TOKENS = 4
"""More go to torch's library, which reuses what it has read."""


def available() -> bool:
    return library() is not None


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    out = _few(x_TD, weight_OD, bias_O)
    return F.linear(x_TD, weight_OD, bias_O) if out is None else out


def linear_silu_mul(x_TD: Tensor, weight_2FD: Tensor) -> Tensor:
    return silu_mul(linear(x_TD, weight_2FD))


def _few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """None where torch is the better choice."""
    loaded = library()
    if loaded is None or x.dim() != 2 or x.shape[0] > MAX_TOKENS or x.dtype not in DTYPES or weight.dtype != x.dtype:
        return None
    if x.stride(1) != 1 or weight.stride(1) != 1 or (bias is not None and bias.dtype != x.dtype):
        return None
    tokens, rows = x.shape[0], weight.shape[0]
    out = x.new_empty((tokens, rows))
    loaded.bough_linear_rows(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), tokens, rows,
        x.shape[1], x.stride(0), weight.stride(0), DTYPES[x.dtype],
    )  # fmt: skip
    return out
