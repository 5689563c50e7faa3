"""Norms in one pass over each row, by the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES
from bough.kernels.norm import reference


def available() -> bool:
    return library() is not None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    loaded = library()
    if loaded is None or x_TD.dtype not in DTYPES:
        return reference.rms_norm(x_TD, weight_D, eps, offset=offset)
    width = x_TD.shape[-1]
    if x_TD.dim() != 2 or x_TD.stride(-1) != 1:
        return rms_norm(x_TD.reshape(-1, width).contiguous(), weight_D, eps, offset=offset).view(x_TD.shape)
    out = x_TD.new_empty(x_TD.shape)
    loaded.bough_rms_norm(
        x_TD.data_ptr(), x_TD.stride(0), None, 0, weight_D.data_ptr(), out.data_ptr(), None,
        x_TD.shape[0], width, eps, offset, DTYPES[x_TD.dtype], DTYPES[weight_D.dtype],
    )  # fmt: skip
    return out


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    loaded = library()
    plain = x_TD.dim() == 2 and x_TD.stride(1) == 1 and residual_TD.stride(1) == 1 and residual_TD.dtype == x_TD.dtype
    if loaded is None or not plain or x_TD.dtype not in DTYPES:
        return reference.add_rms_norm(x_TD, residual_TD, weight_D, eps, offset=offset)
    out, total = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    loaded.bough_rms_norm(
        x_TD.data_ptr(), x_TD.stride(0), residual_TD.data_ptr(), residual_TD.stride(0), weight_D.data_ptr(),
        out.data_ptr(), total.data_ptr(), x_TD.shape[0], x_TD.shape[1], eps, offset, DTYPES[x_TD.dtype],
        DTYPES[weight_D.dtype],
    )  # fmt: skip
    return out, total
