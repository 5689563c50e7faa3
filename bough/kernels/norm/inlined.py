"""The norm as the beginning of other kernels' launches on Hopper: `norm_tokens` of `hopper.cuh`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class NormedStruct(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "norm", "total")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    )


def normed(
    x_TD: Tensor, residual_TD: Tensor, norm_D: Tensor, eps: float, offset: float, total_TD: Tensor
) -> NormedStruct:
    """For which `suits`. The contiguous `total_TD` is filled, and must not overlap the others."""
    return NormedStruct(
        x=x_TD.data_ptr(), residual=residual_TD.data_ptr(), norm=norm_D.data_ptr(), total=total_TD.data_ptr(),
        x_stride=x_TD.stride(0), residual_stride=residual_TD.stride(0), eps=eps, offset=offset,
    )  # fmt: skip


def suits(x_TD: Tensor, residual_TD: Tensor, norm_D: Tensor) -> bool:
    """Whether a launch can begin with this norm of x + residual."""
    if x_TD.shape != residual_TD.shape or x_TD.shape[-1] % 8 or norm_D.dtype != torch.bfloat16:
        return False
    return norm_D.is_contiguous() and norm_D.data_ptr() % 16 == 0 and are_rows(x_TD) and are_rows(residual_TD)


def are_rows(x_TD: Tensor) -> bool:
    """Whether they are bf16, and each starts at a multiple of 16 bytes."""
    if x_TD.dim() != 2 or x_TD.dtype != torch.bfloat16 or x_TD.stride(1) != 1 or x_TD.data_ptr() % 16:
        return False
    return x_TD.shape[0] == 1 or x_TD.stride(0) % 8 == 0
