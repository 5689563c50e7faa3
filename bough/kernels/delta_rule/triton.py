# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The gated delta rule on the GPU: one launch for single tokens of all rows; for the tokens of a row two, one over all
chunks side by side and one that goes through them in order. Where lines of a state decay by rates of their own, one launch
goes through a row's tokens one by one: chunks would need products of three factors, which tensor cores don't have."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.delta_rule.reference import CHUNK_TOKENS, LEAST_SQUARE
from bough.kernels.launching import Launcher, cdiv, power_of_two, wait

_STEP_VALUES = 32
"""Columns of a state that one program advances: with 128 keys, 32 numbers per thread."""
_SCAN_VALUES = 32
"""The same for a row of several tokens: 32 heads of 128 values make as many programs as an H200 has multiprocessors."""
_PRECISION = tl.constexpr("tf32x3")
"""Products of float32 numbers on tensor cores, in three parts: about as exact as float32."""


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    g,
    b,
    states,
    at,
    out,
    q_row,
    k_row,
    v_row,
    H,
    K,
    V,
    least,
    SHARE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`CHANNELS`: rates are by line of a state."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(V, VALUES)
    head = tl.program_id(1) // blocks
    c = tl.program_id(1) % blocks * VALUES + tl.arange(0, VALUES)
    r = tl.arange(0, KEYS)
    in_k, in_v = r < K, c < V
    inside = in_k[:, None] & in_v[None, :]
    wait(PDL)
    held = states + (tl.load(at + row) * H + head) * K * V + r[:, None] * V + c[None, :]
    state = tl.load(held, mask=inside, other=0.0)
    key_head = head // SHARE * K
    qs = tl.load(q + row * q_row + key_head + r, mask=in_k, other=0.0)
    ks = tl.load(k + row * k_row + key_head + r, mask=in_k, other=0.0)
    qs *= tl.rsqrt(tl.sum(qs * qs, 0) + least) * tl.rsqrt(K * 1.0)
    ks *= tl.rsqrt(tl.sum(ks * ks, 0) + least)
    vs = tl.load(v + row * v_row + head * V + c, mask=in_v, other=0.0)
    if CHANNELS:
        state *= tl.exp(tl.load(g + (row * H + head) * K + r, mask=in_k, other=0.0))[:, None]
    else:
        state *= tl.exp(tl.load(g + row * H + head))
    added = tl.load(b + row * H + head) * (vs - tl.sum(state * ks[:, None], 0))
    state += ks[:, None] * added[None, :]
    tl.store(held, state, mask=inside)
    tl.store(out + row * H * V + head * V + c, tl.sum(state * qs[:, None], 0), mask=in_v)


_STEP = Launcher(_step_kernel)


def step_rows(
    q_RGK: Tensor, k_RGK: Tensor, v_RHV: Tensor, g_RHK: Tensor, b_RH: Tensor, states_SHKV: Tensor, at_R: Tensor
) -> Tensor:
    (rows, heads, values), (groups, keys) = v_RHV.shape, q_RGK.shape[1:]
    q, k, v = _rows(q_RGK), _rows(k_RGK), _rows(v_RHV)
    out = torch.empty(rows, heads, values, dtype=torch.float32, device=v.device)
    block = min(_STEP_VALUES, power_of_two(values))
    _STEP.launch(
        (rows, heads * cdiv(values, block)),
        (q, k, v, g_RHK.contiguous(), b_RH.contiguous(), states_SHKV, at_R.contiguous(), out),
        (q.stride(0), k.stride(0), v.stride(0), heads, keys, values),
        (LEAST_SQUARE,),
        (heads // groups, power_of_two(keys), block, g_RHK.shape[2] > 1),
        num_warps=4,
    )
    return out


@triton.jit
def _units(x, token, length, r, K, x_row, least):
    """[tokens, KEYS]: vectors of length 1."""
    inside = (token[:, None] < length) & (r[None, :] < K)
    xs = tl.load(x + token[:, None].to(tl.int64) * x_row + r[None, :], mask=inside, other=0.0)
    return xs * tl.rsqrt(tl.sum(xs * xs, 1) + least)[:, None]


@triton.jit
def _decays(g, token, length, H, TOKENS: tl.constexpr):
    """(sums of g up to each token of a chunk, exp of their differences [i, j] for j <= i)."""
    gs = tl.load(g + token.to(tl.int64) * H, mask=token < length, other=0.0)
    place = tl.arange(0, TOKENS)
    total = tl.sum(tl.where(place[None, :] <= place[:, None], gs[None, :], 0.0), 1)
    between = tl.where(place[:, None] >= place[None, :], total[:, None] - total[None, :], -float("inf"))
    return total, tl.exp(between)


@triton.jit(do_not_specialize=["length"])
def _chunk_kernel(
    k,
    v,
    g,
    b,
    w,
    u,
    length,
    k_row,
    v_row,
    H,
    K,
    V,
    least,
    SHARE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """With d_i = u_i - w_i S, of the corrections of a chunk's tokens, what does not depend on the state S before it:
    u = T (b v) and w = T (b exp(G) k), T the inverse of I + tril(b k k' exp(G_i - G_j), -1)."""
    head = tl.program_id(1)
    place = tl.arange(0, TOKENS)
    token = tl.program_id(0) * TOKENS + place
    r, c = tl.arange(0, KEYS), tl.arange(0, VALUES)
    ks = _units(k + head // SHARE * K, token, length, r, K, k_row, least)
    rates = tl.load(b + token.to(tl.int64) * H + head, mask=token < length, other=0.0)
    total, decay = _decays(g + head, token, length, H, TOKENS)
    within = tl.dot(ks, tl.trans(ks), input_precision=_PRECISION) * decay * rates[:, None]
    inverse = tl.where(place[:, None] > place[None, :], -within, 0.0)
    for i in range(1, TOKENS):
        line = tl.sum(tl.where(place[:, None] == i, inverse, 0.0), 0)
        line += tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(place[:, None] == i, line[None, :], inverse)
    inverse += tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    at = token[:, None].to(tl.int64) * H + head
    real = token[:, None] < length
    ws = tl.dot(inverse, ks * (rates * tl.exp(total))[:, None], input_precision=_PRECISION)
    tl.store(w + at * K + r[None, :], ws, mask=real & (r[None, :] < K))
    in_v = real & (c[None, :] < V)
    vs = tl.load(v + token[:, None].to(tl.int64) * v_row + head * V + c[None, :], mask=in_v, other=0.0)
    tl.store(u + at * V + c[None, :], tl.dot(inverse, vs * rates[:, None], input_precision=_PRECISION), mask=in_v)


@triton.jit(do_not_specialize=["length"])
def _scan_kernel(
    q,
    k,
    g,
    w,
    u,
    state,
    out,
    length,
    q_row,
    k_row,
    H,
    K,
    V,
    least,
    SHARE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    head = tl.program_id(0)
    r = tl.arange(0, KEYS)
    c = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    place = tl.arange(0, TOKENS)
    in_s = (r[:, None] < K) & (c[None, :] < V)
    held = state + head * K * V + r[:, None] * V + c[None, :]
    s = tl.load(held, mask=in_s, other=0.0)
    scale = tl.rsqrt(K * 1.0)
    for first in range(0, length, TOKENS):
        token = first + place
        at = token[:, None].to(tl.int64) * H + head
        in_k = (token[:, None] < length) & (r[None, :] < K)
        in_v = (token[:, None] < length) & (c[None, :] < V)
        qs = _units(q + head // SHARE * K, token, length, r, K, q_row, least) * scale
        ks = _units(k + head // SHARE * K, token, length, r, K, k_row, least)
        total, decay = _decays(g + head, token, length, H, TOKENS)
        ws = tl.load(w + at * K + r[None, :], mask=in_k, other=0.0)
        us = tl.load(u + at * V + c[None, :], mask=in_v, other=0.0)
        added = us - tl.dot(ws, s, input_precision=_PRECISION)
        read = tl.dot(qs * tl.exp(total)[:, None], s, input_precision=_PRECISION)
        read += tl.dot(tl.dot(qs, tl.trans(ks), input_precision=_PRECISION) * decay, added, input_precision=_PRECISION)
        tl.store(out + at * V + c[None, :], read, mask=in_v)
        last = tl.sum(tl.where(place == TOKENS - 1, total, 0.0), 0)  # tokens behind the row's last one have no decay
        left = ks * tl.exp(last - total)[:, None]
        s = s * tl.exp(last) + tl.dot(tl.trans(left), added, input_precision=_PRECISION)
    tl.store(held, s, mask=in_s)


@triton.jit(do_not_specialize=["length"])
def _tokens_kernel(
    q,
    k,
    v,
    g,
    b,
    state,
    out,
    length,
    q_row,
    k_row,
    v_row,
    H,
    K,
    V,
    least,
    SHARE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Token after token, with rates by line of the state."""
    head = tl.program_id(0)
    r = tl.arange(0, KEYS)
    c = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    in_k, in_v = r < K, c < V
    inside = in_k[:, None] & in_v[None, :]
    held = state + head * K * V + r[:, None] * V + c[None, :]
    s = tl.load(held, mask=inside, other=0.0)
    key_head = head // SHARE * K
    scale = tl.rsqrt(K * 1.0)
    for token in range(length):
        at = tl.cast(token, tl.int64)
        qs = tl.load(q + at * q_row + key_head + r, mask=in_k, other=0.0)
        ks = tl.load(k + at * k_row + key_head + r, mask=in_k, other=0.0)
        qs *= tl.rsqrt(tl.sum(qs * qs, 0) + least) * scale
        ks *= tl.rsqrt(tl.sum(ks * ks, 0) + least)
        vs = tl.load(v + at * v_row + head * V + c, mask=in_v, other=0.0)
        s *= tl.exp(tl.load(g + (at * H + head) * K + r, mask=in_k, other=0.0))[:, None]
        added = tl.load(b + at * H + head) * (vs - tl.sum(s * ks[:, None], 0))
        s += ks[:, None] * added[None, :]
        tl.store(out + (at * H + head) * V + c, tl.sum(s * qs[:, None], 0), mask=in_v)
    tl.store(held, s, mask=inside)


def scan_row(q_LGK: Tensor, k_LGK: Tensor, v_LHV: Tensor, g_LHK: Tensor, b_LH: Tensor, state_HKV: Tensor) -> Tensor:
    (length, heads, values), (groups, keys) = v_LHV.shape, q_LGK.shape[1:]
    q, k, v, g, b = _rows(q_LGK), _rows(k_LGK), _rows(v_LHV), g_LHK.contiguous(), b_LH.contiguous()
    out = torch.empty(length, heads, values, dtype=torch.float32, device=v.device)
    if g_LHK.shape[2] > 1:
        block = min(_STEP_VALUES, power_of_two(values))
        _tokens_kernel[(heads, cdiv(values, block))](
            q, k, v, g, b, state_HKV, out, length, q.stride(0), k.stride(0), v.stride(0), heads, keys, values,
            LEAST_SQUARE, heads // groups, power_of_two(keys), block, num_warps=4,
        )  # fmt: skip
        return out
    w, u = out.new_empty(length, heads, keys), torch.empty_like(out)
    share, block_k, block_v = heads // groups, power_of_two(keys, at_least=16), power_of_two(values, at_least=16)
    _chunk_kernel[(cdiv(length, CHUNK_TOKENS), heads)](
        k, v, g, b, w, u, length, k.stride(0), v.stride(0), heads, keys, values, LEAST_SQUARE, share, CHUNK_TOKENS,
        block_k, block_v, num_warps=4, num_stages=1,
    )  # fmt: skip
    block = min(_SCAN_VALUES, block_v)
    _scan_kernel[(heads, cdiv(values, block))](
        q, k, g, w, u, state_HKV, out, length, q.stride(0), k.stride(0), heads, keys, values, LEAST_SQUARE, share,
        CHUNK_TOKENS, block_k, block, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """Tokens may lie apart; what is of one is not."""
    flat = x.flatten(1)
    return flat if flat.stride(1) == 1 else flat.contiguous()
