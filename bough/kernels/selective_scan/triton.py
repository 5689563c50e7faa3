# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Mamba's recurrence on the GPU: a program for some channels, with their states in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import cdiv, power_of_two

_SCAN_CHANNELS = 32
_STEP_CHANNELS = 128


@triton.jit
def _advance(x, dt, b, c, out, token, channel, n, in_c, in_n, a, d, s, x_stride, dt_stride, b_stride, c_stride, C):
    """The states behind a token, whose result is written."""
    step = tl.load(dt + token * dt_stride + channel, mask=in_c, other=0.0)
    xs = tl.load(x + token * x_stride + channel, mask=in_c, other=0.0)
    bs = tl.load(b + token * b_stride + n, mask=in_n, other=0.0)
    cs = tl.load(c + token * c_stride + n, mask=in_n, other=0.0)
    s = s * tl.exp(step[:, None] * a) + (xs * step)[:, None] * bs[None, :]
    tl.store(out + token * C + channel, tl.sum(s * cs[None, :], 1) + d * xs, mask=in_c)
    return s


@triton.jit(do_not_specialize=["length"])
def _scan_kernel(x, dt, rate, b, c, skip, state, out, length, x_stride, dt_stride, b_stride, c_stride, C,
                 N: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, STATES)
    in_c, in_n = channel < C, n < N
    inside = in_c[:, None] & in_n[None, :]
    place = channel[:, None] * N + n[None, :]
    s = tl.load(state + place, mask=inside, other=0.0)
    a = tl.load(rate + place, mask=inside, other=0.0)
    d = tl.load(skip + channel, mask=in_c, other=0.0)
    for token in range(length):
        s = _advance(
            x, dt, b, c, out, token, channel, n, in_c, in_n, a, d, s, x_stride, dt_stride, b_stride, c_stride, C
        )
    tl.store(state + place, s, mask=inside)


@triton.jit
def _step_kernel(x, dt, rate, b, c, skip, states, rows, out, x_stride, dt_stride, b_stride, c_stride, C,
                 N: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, STATES)
    in_c, in_n = channel < C, n < N
    inside = in_c[:, None] & in_n[None, :]
    place = channel[:, None] * N + n[None, :]
    held = states + tl.load(rows + row).to(tl.int64) * C * N + place
    s = tl.load(held, mask=inside, other=0.0)
    a = tl.load(rate + place, mask=inside, other=0.0)
    d = tl.load(skip + channel, mask=in_c, other=0.0)
    s = _advance(x, dt, b, c, out, row, channel, n, in_c, in_n, a, d, s, x_stride, dt_stride, b_stride, c_stride, C)
    tl.store(held, s, mask=inside)


def scan_row(
    x_LC: Tensor, dt_LC: Tensor, a_CN: Tensor, b_LN: Tensor, c_LN: Tensor, d_C: Tensor, state_CN: Tensor
) -> Tensor:
    channels, states = a_CN.shape
    x, dt, b, c = _dense(x_LC), _dense(dt_LC), _dense(b_LN), _dense(c_LN)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _scan_kernel[(cdiv(channels, _SCAN_CHANNELS),)](
        x, dt, a_CN, b, c, d_C, state_CN, out, len(x), x.stride(0), dt.stride(0), b.stride(0), c.stride(0), channels,
        states, _SCAN_CHANNELS, power_of_two(states), num_warps=1,
    )  # fmt: skip
    return out


def step_rows(
    x_RC: Tensor, dt_RC: Tensor, a_CN: Tensor, b_RN: Tensor, c_RN: Tensor, d_C: Tensor, states_SCN: Tensor, at_R: Tensor
) -> Tensor:
    channels, states = a_CN.shape
    x, dt, b, c = _dense(x_RC), _dense(dt_RC), _dense(b_RN), _dense(c_RN)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _step_kernel[(len(x), cdiv(channels, _STEP_CHANNELS))](
        x, dt, a_CN, b, c, d_C, states_SCN, at_R.contiguous(), out, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        channels, states, _STEP_CHANNELS, power_of_two(states), num_warps=4,
    )  # fmt: skip
    return out


def _dense(x: Tensor) -> Tensor:
    """Tokens may lie apart; what is of one is not."""
    return x if x.stride(1) == 1 else x.contiguous()
