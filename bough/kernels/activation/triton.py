# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Gated activations on the GPU: one program a stretch of a row."""

from __future__ import annotations

from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, power_of_two, trigger, wait
from bough.kernels.pitch import empty_rows


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """act(gate) * up in float32."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * inner) * up
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _gated_kernel(
    x, out, x_steps, out_stride, f_steps, STEP: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Rows of x begin every `x_steps` times STEP values, and their second halves `f_steps` times STEP further, so that STEP
    values can be loaded at once: Triton would not find that out of a width like 3,420. What lies between the rows of `out`
    gets zeros."""
    x_stride, F = x_steps * STEP, f_steps * STEP
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < F
    trigger(PDL)
    wait(PDL)
    gate = tl.load(x + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + F + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + col, gated(gate, up, GELU).to(out.dtype.element_ty), mask=col < out_stride)


_GATED = Launcher(_gated_kernel)
_MOST_AT_ONCE = 16
"""Values: what Triton assumes of strides that are multiples of it."""


def _launch(x_T2F: Tensor, gelu: bool) -> Tensor:
    x = x_T2F.reshape(-1, x_T2F.shape[-1])
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = empty_rows(rows, width, x.dtype, x.device, zeros=False)
    if rows:
        block = min(1024, power_of_two(width))
        grid = (rows, cdiv(out.stride(0), block))
        step = gcd(x.stride(0), width, _MOST_AT_ONCE)
        steps = (x.stride(0) // step, out.stride(0), width // step)
        _GATED.launch(grid, (x, out), steps, (), (step, gelu, block), num_warps=4)
    return out if x_T2F.dim() == 2 else out.reshape(*x_T2F.shape[:-1], width)


def silu_mul(x_T2F: Tensor) -> Tensor:
    return _launch(x_T2F, gelu=False)


def gelu_tanh_mul(x_T2F: Tensor) -> Tensor:
    return _launch(x_T2F, gelu=True)
