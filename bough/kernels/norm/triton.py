# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Norms on the GPU: one program a row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, power_of_two, trigger, wait, warps_for


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    x_part_stride,
    residual_stride,
    eps,
    offset,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < D
    trigger(PDL)
    w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    value = tl.load(x + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + part * x_part_stride + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + col, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * D + col, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(out + row * D + col, (value * scale * (w + offset)).to(out.dtype.element_ty), mask=inside)


_NORM = Launcher(_norm_kernel)


def _rows(x: Tensor) -> Tensor:
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    x = _rows(x_TD)
    out = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    _launch(x, x, weight_D, out, out, eps, offset, add=False)
    return out


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    parts = x_TD.shape[0] if x_TD.dim() > residual_TD.dim() else 1
    x, residual = _rows(x_TD), _rows(residual_TD)
    out, total = x.new_empty(residual_TD.shape), x.new_empty(residual_TD.shape)
    _launch(x, residual, weight_D, out, total, eps, offset, add=True, parts=parts)
    return out, total


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, offset: float, *,
    add: bool, parts: int = 1,
) -> None:  # fmt: skip
    """`x` has the rows of all parts, one part after the other."""
    rows, width = residual.shape
    if rows == 0:
        return
    block, stride = power_of_two(width), x.stride(0)
    part_stride = rows * stride if parts > 1 else 0
    _NORM.launch(
        (rows, 1),
        (x, residual, weight, out, total),
        (stride, part_stride, residual.stride(0)),
        (eps, offset),
        (width, parts, add, block),
        warps_for(block),
    )
