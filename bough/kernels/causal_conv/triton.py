# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The convolution on the GPU: a program for some channels of some tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import cdiv

_TOKENS = 16
_CHANNELS = 128


@triton.jit(do_not_specialize=["length"])
def _row_kernel(x, weight, bias, state, out, length, x_stride, C, W: tl.constexpr, BIAS: tl.constexpr,
                SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (t < length) & (c < C)
    acc = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if BIAS:
        acc += tl.load(bias + c, mask=c < C, other=0.0)
    for back in tl.static_range(W):
        at = t - back
        own = tl.load(x + at.to(tl.int64) * x_stride + c, mask=inside & (at >= 0), other=0.0).to(tl.float32)
        before = tl.load(state + c * (W - 1) + (W - 1 + at), mask=inside & (at < 0), other=0.0)
        acc += tl.load(weight + c * W + (W - 1 - back), mask=c < C, other=0.0) * (own + before)
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    tl.store(out + t.to(tl.int64) * C + c, acc, mask=inside)


@triton.jit(do_not_specialize=["length"])
def _last_kernel(x, state, length, x_stride, C, W: tl.constexpr, CHANNELS: tl.constexpr):
    """The state behind a row's last token. Each place is read before a later one overwrites it: inputs move to the front."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    for place in tl.static_range(W - 1):
        at = length - (W - 1) + place + tl.zeros_like(c)
        own = tl.load(x + at.to(tl.int64) * x_stride + c, mask=(c < C) & (at >= 0), other=0.0).to(tl.float32)
        before = tl.load(state + c * (W - 1) + (W - 1 + at), mask=(c < C) & (at < 0), other=0.0)
        tl.store(state + c * (W - 1) + place, own + before, mask=c < C)


@triton.jit
def _ones_kernel(x, weight, bias, states, rows, out, x_stride, C, W: tl.constexpr, BIAS: tl.constexpr,
                 SILU: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    held = states + tl.load(rows + row) * C * (W - 1) + c * (W - 1)
    own = tl.load(x + row.to(tl.int64) * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    acc = own * tl.load(weight + c * W + W - 1, mask=inside, other=0.0)
    if BIAS:
        acc += tl.load(bias + c, mask=inside, other=0.0)
    for place in tl.static_range(W - 1):
        value = tl.load(held + place, mask=inside, other=0.0)
        acc += value * tl.load(weight + c * W + place, mask=inside, other=0.0)
        if place > 0:
            tl.store(held + place - 1, value, mask=inside)
    tl.store(held + W - 2, own, mask=inside)
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    tl.store(out + row.to(tl.int64) * C + c, acc, mask=inside)


def conv_row(x_LC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, state_CW: Tensor, *, silu: bool = True) -> Tensor:
    x_LC = x_LC if x_LC.stride(1) == 1 else x_LC.contiguous()
    (length, channels), width = x_LC.shape, weight_CW.shape[1]
    out = torch.empty(length, channels, dtype=torch.float32, device=x_LC.device)
    bias = weight_CW if bias_C is None else bias_C
    blocks = cdiv(channels, _CHANNELS)
    _row_kernel[(cdiv(length, _TOKENS), blocks)](
        x_LC, weight_CW, bias, state_CW, out, length, x_LC.stride(0), channels, width, bias_C is not None, silu,
        _TOKENS, _CHANNELS,
    )  # fmt: skip
    _last_kernel[(blocks,)](x_LC, state_CW, length, x_LC.stride(0), channels, width, _CHANNELS)
    return out


def conv_ones(
    x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_SCW: Tensor, at_N: Tensor, *, silu: bool = True
) -> Tensor:
    x_NC = x_NC if x_NC.stride(1) == 1 else x_NC.contiguous()
    (rows, channels), width = x_NC.shape, weight_CW.shape[1]
    out = torch.empty(rows, channels, dtype=torch.float32, device=x_NC.device)
    bias = weight_CW if bias_C is None else bias_C
    _ones_kernel[(rows, cdiv(channels, _CHANNELS))](
        x_NC, weight_CW, bias, states_SCW, at_N.contiguous(), out, x_NC.stride(0), channels, width, bias_C is not None, silu,
        _CHANNELS,
    )  # fmt: skip
    return out
