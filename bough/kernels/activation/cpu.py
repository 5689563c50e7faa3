"""Gated activations by the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from bough.kernels.activation import reference
from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES


def available() -> bool:
    return library() is not None


def silu_mul(x_T2F: Tensor) -> Tensor:
    out = _gated(x_T2F, True)
    return reference.silu_mul(x_T2F) if out is None else out


def gelu_tanh_mul(x_T2F: Tensor) -> Tensor:
    out = _gated(x_T2F, False)
    return reference.gelu_tanh_mul(x_T2F) if out is None else out


def _gated(x_T2F: Tensor, silu: bool) -> Tensor | None:
    """None where the kernel doesn't apply."""
    loaded = library()
    if loaded is None or x_T2F.dtype not in DTYPES:
        return None
    width = x_T2F.shape[-1] // 2
    if x_T2F.dim() != 2 or x_T2F.stride(1) != 1:
        out = _gated(x_T2F.reshape(-1, 2 * width).contiguous(), silu)
        return None if out is None else out.view(*x_T2F.shape[:-1], width)
    out = x_T2F.new_empty((x_T2F.shape[0], width))
    loaded.bough_gated(
        x_T2F.data_ptr(), x_T2F.stride(0), out.data_ptr(), x_T2F.shape[0], width, DTYPES[x_T2F.dtype], silu
    )
    return out
