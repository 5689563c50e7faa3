# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Mamba 2's recurrence on the GPU: a program for some of a head's inputs, with their part of its state in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import cdiv, power_of_two

_WIDTH = 32
"""Inputs of a head per program of a scan. More would compute what tokens see of each other less often, and spill."""


@triton.jit(do_not_specialize=["length"])
def _scan_kernel(x, dt, rate, b, c, skip, state, out, length, x_stride, dt_stride, b_stride, c_stride,
                 H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr,
                 TOKENS: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr):  # fmt: skip
    """Chunk after chunk: tokens of one read each other by a product, and those before by the state."""
    head = tl.program_id(0)
    p = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    n = tl.arange(0, STATES)
    k = tl.arange(0, TOKENS)
    in_p, in_n = p < P, n < N
    held = state + head * P * N + p[:, None] * N + n[None, :]
    s = tl.load(held, mask=in_p[:, None] & in_n[None, :], other=0.0)
    a, d = tl.load(rate + head), tl.load(skip + head)
    shared = head // SHARE * N
    earlier = k[:, None] >= k[None, :]
    for first in range(0, length, TOKENS):
        t = (first + k).to(tl.int64)
        in_t = t < length
        step = tl.load(dt + t * dt_stride + head, mask=in_t, other=0.0)
        total = tl.cumsum(step * a, 0)
        last = tl.sum(step * a, 0)
        bs = tl.load(b + t[:, None] * b_stride + shared + n[None, :], mask=in_t[:, None] & in_n[None, :], other=0.0)
        cs = tl.load(c + t[:, None] * c_stride + shared + n[None, :], mask=in_t[:, None] & in_n[None, :], other=0.0)
        inside = in_t[:, None] & in_p[None, :]
        xs = tl.load(x + t[:, None] * x_stride + head * P + p[None, :], mask=inside, other=0.0)
        decay = tl.exp(tl.where(earlier, total[:, None] - total[None, :], float("-inf")))
        seen = tl.dot(cs, tl.trans(bs), input_precision="tf32x3") * decay * step[None, :]
        y = tl.dot(cs, tl.trans(s), input_precision="tf32x3") * tl.exp(total)[:, None] + d * xs
        y = tl.dot(seen, xs, y, input_precision="tf32x3")
        tl.store(out + t[:, None] * (H * P) + head * P + p[None, :], y, mask=inside)
        left = tl.exp(last - total) * step
        s = tl.dot(tl.trans(xs * left[:, None]), bs, s * tl.exp(last), input_precision="tf32x3")
    tl.store(held, s, mask=in_p[:, None] & in_n[None, :])


@triton.jit
def _step_kernel(x, dt, rate, b, c, skip, states, rows, out, x_stride, dt_stride, b_stride, c_stride,
                 H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr,
                 WIDTH: tl.constexpr, STATES: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    n = tl.arange(0, STATES)
    in_p, in_n = p < P, n < N
    inside = in_p[:, None] & in_n[None, :]
    held = states + (tl.load(rows + row).to(tl.int64) * H + head) * P * N + p[:, None] * N + n[None, :]
    s = tl.load(held, mask=inside, other=0.0)
    step = tl.load(dt + row * dt_stride + head)
    shared = head // SHARE * N
    bs = tl.load(b + row * b_stride + shared + n, mask=in_n, other=0.0)
    cs = tl.load(c + row * c_stride + shared + n, mask=in_n, other=0.0)
    xs = tl.load(x + row * x_stride + head * P + p, mask=in_p, other=0.0)
    s = s * tl.exp(step * tl.load(rate + head)) + (xs * step)[:, None] * bs[None, :]
    tl.store(held, s, mask=inside)
    y = tl.sum(s * cs[None, :], 1) + tl.load(skip + head) * xs
    tl.store(out + row * (H * P) + head * P + p, y, mask=in_p)


def scan_row(
    x_LHP: Tensor, dt_LH: Tensor, a_H: Tensor, b_LGN: Tensor, c_LGN: Tensor, d_H: Tensor, state_HPN: Tensor
) -> Tensor:
    (length, heads, width), (groups, states) = x_LHP.shape, b_LGN.shape[1:]
    x, dt, b, c = _rows(x_LHP), _rows(dt_LH), _rows(b_LGN), _rows(c_LGN)
    out = torch.empty(length, heads, width, dtype=torch.float32, device=x.device)
    block = power_of_two(states, at_least=16)
    tokens = 64 if block <= 128 else 32  # B, C and the state of a chunk are in shared memory
    _scan_kernel[(heads, cdiv(width, _WIDTH))](
        x, dt, a_H, b, c, d_H, state_HPN, out, length, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        heads, width, states, heads // groups, tokens, _WIDTH, block, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def step_rows(
    x_RHP: Tensor, dt_RH: Tensor, a_H: Tensor, b_RGN: Tensor, c_RGN: Tensor, d_H: Tensor, states_SHPN: Tensor, at_R: Tensor
) -> Tensor:  # fmt: skip
    (rows, heads, width), (groups, states) = x_RHP.shape, b_RGN.shape[1:]
    x, dt, b, c = _rows(x_RHP), _rows(dt_RH), _rows(b_RGN), _rows(c_RGN)
    out = torch.empty(rows, heads, width, dtype=torch.float32, device=x.device)
    block = power_of_two(states)
    part = max(1, min(power_of_two(width), 4096 // block))  # of a state, per program
    _step_kernel[(rows, heads, cdiv(width, part))](
        x, dt, a_H, b, c, d_H, states_SHPN, at_R.contiguous(), out, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        heads, width, states, heads // groups, part, block, num_warps=4,
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """Tokens may lie apart; what is of one is not."""
    flat = x.flatten(1)
    return flat if flat.stride(1) == 1 else flat.contiguous()
