# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The products around attention over latents, of few tokens, in a launch each: all that precedes attention, and the values.

The vendor's batched products would be launches of their own that wait for those before them; here the matrices, which no
kernel of a step writes, are read while the kernel before still runs. N heads, R width of a latent, E width of the rotated
part of a key, C of the rest, V width of a value, X = C + V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.attention.inputs import RawLatents
from bough.kernels.launching import Launcher, cdiv, power_of_two, trigger, wait
from bough.kernels.rotary.triton import to_cache

MOST_TOKENS, MOST_VALUED = 256, 48
"""Of what precedes attention, and of the values; of more, the matrices are worth the vendor's tiles. DeepSeek-V2-Lite's 16
heads on an H200, us by tokens of a program (16, 32, 64, 128), and with the vendor's products:

    tokens      before attention               vendor   values                         vendor
    24          2.5    2.4    2.5    3.1       5.7      2.8    3.0    3.2    3.6       3.6
    48          2.8    2.8    2.7    3.5       5.7      3.3    3.7    3.6    3.8       3.7
    100         5.0    3.7    3.2    4.1       5.9      4.8    4.6    4.1    4.2       3.9
    200         8.6    6.1    4.5    6.3       6.2      9.0    8.8    5.2    4.9       4.1
"""
_VALUED_AT_ONCE = 16
"""Tokens of a program that makes values."""
_KEYS_AT_ONCE = tl.constexpr(16)
"""Tokens whose latents a program norms."""


@triton.jit
def _queries_part(
    q,
    up,
    positions,
    cos_sin,
    out,
    q_token,
    q_head,
    up_head,
    tokens,
    first_token,
    part,
    N: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some of the R numbers of a head's absorbed queries. The first program of a head rotates its queries as well."""
    HALF: tl.constexpr = E // 2
    PER_HEAD: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    DTYPE: tl.constexpr = out.dtype.element_ty
    head = part // PER_HEAD
    begin = part % PER_HEAD * BLOCK_R
    row = begin + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    up_at = up + head * up_head + col[:, None] * R + row[None, :]
    up_tile = tl.load(up_at, mask=(col < C)[:, None] & (row < R)[None, :], other=0.0)
    token = (first_token + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = token < tokens
    wait(PDL)
    q_at = q + token[:, None] * q_token + head * q_head
    q_tile = tl.load(q_at + col[None, :], mask=here[:, None] & (col < C)[None, :], other=0.0)
    made = tl.dot(q_tile, up_tile, input_precision=PRECISION)
    out_at = out + (token[:, None] * N + head) * (R + E)
    tl.store(out_at + row[None, :], made.to(DTYPE), mask=here[:, None] & (row < R)[None, :])
    if begin == 0:
        half = tl.arange(0, BLOCK_HALF)
        first, second = _turned(half, HALF, INTERLEAVED)
        inside = here[:, None] & (half < HALF)[None, :]
        position = tl.load(positions + token, mask=here, other=0).to(tl.int64)
        angle_at = cos_sin + position[:, None] * E + half[None, :]
        cos = tl.load(angle_at, mask=inside, other=0.0)
        sin = tl.load(angle_at + HALF, mask=inside, other=0.0)
        a = tl.load(q_at + C + first[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(q_at + C + second[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out_at + R + first[None, :], (a * cos - b * sin).to(DTYPE), mask=inside)
        tl.store(out_at + R + second[None, :], (b * cos + a * sin).to(DTYPE), mask=inside)


@triton.jit
def _keys_part(
    kv,
    weight,
    positions,
    cos_sin,
    loc,
    cache,
    out,
    kv_token,
    cache_token,
    tokens,
    first_token,
    eps,
    offset,
    inverse_scale,
    R: tl.constexpr,
    E: tl.constexpr,
    SCALED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ALL_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norms the latents of _KEYS_AT_ONCE tokens, rotates their keys, and writes both."""
    HALF: tl.constexpr = E // 2
    DTYPE: tl.constexpr = out.dtype.element_ty
    CACHE: tl.constexpr = cache.dtype.element_ty
    token = (first_token + tl.arange(0, _KEYS_AT_ONCE)).to(tl.int64)
    here = token < tokens
    half = tl.arange(0, BLOCK_HALF)
    first, second = _turned(half, HALF, INTERLEAVED)
    dim = tl.arange(0, ALL_R)
    in_rank = here[:, None] & (dim < R)[None, :]
    inside = here[:, None] & (half < HALF)[None, :]
    factor = tl.load(weight + dim, mask=dim < R, other=0.0).to(tl.float32) + offset
    wait(PDL)
    position = tl.load(positions + token, mask=here, other=0).to(tl.int64)
    angle_at = cos_sin + position[:, None] * E + half[None, :]
    cos = tl.load(angle_at, mask=inside, other=0.0)
    sin = tl.load(angle_at + HALF, mask=inside, other=0.0)
    kv_at = kv + token[:, None] * kv_token
    x = tl.load(kv_at + dim[None, :], mask=in_rank, other=0.0).to(tl.float32)
    k_a = tl.load(kv_at + R + first[None, :], mask=inside, other=0.0).to(tl.float32)
    k_b = tl.load(kv_at + R + second[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / R + eps)
    latent = (x * scale[:, None] * factor[None, :]).to(DTYPE)
    turned_a = (k_a * cos - k_b * sin).to(DTYPE)
    turned_b = (k_b * cos + k_a * sin).to(DTYPE)
    at = tl.load(loc + token, mask=here, other=-1).to(tl.int64)
    kept = (at >= 0)[:, None]
    place = cache + tl.maximum(at, 0)[:, None] * cache_token
    tl.store(place + dim[None, :], to_cache(latent, inverse_scale, SCALED, CACHE), mask=in_rank & kept)
    tl.store(place + R + first[None, :], to_cache(turned_a, inverse_scale, SCALED, CACHE), mask=inside & kept)
    tl.store(place + R + second[None, :], to_cache(turned_b, inverse_scale, SCALED, CACHE), mask=inside & kept)


@triton.jit
def _turned(half, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the two numbers of each pair that is turned lie."""
    first = 2 * half if INTERLEAVED else half
    second = 2 * half + 1 if INTERLEAVED else half + HALF
    return first, second


@triton.jit(do_not_specialize=["tokens"])
def _absorb_kernel(
    q,
    kv,
    up,
    weight,
    positions,
    cos_sin,
    loc,
    cache,
    out,
    q_token,
    q_head,
    kv_token,
    up_head,
    cache_token,
    tokens,
    eps,
    offset,
    inverse_scale,
    N: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    SCALED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ALL_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has some tokens and, by program_id(1), a part of a head's queries; or the keys of some of the tokens."""
    trigger(PDL)
    part = tl.program_id(1)
    first_token = tl.program_id(0) * BLOCK_T
    PARTS: tl.constexpr = N * ((R + BLOCK_R - 1) // BLOCK_R)
    if part < PARTS:
        _queries_part(
            q, up, positions, cos_sin, out, q_token, q_head, up_head, tokens, first_token, part,
            N, R, E, C, INTERLEAVED, PRECISION, BLOCK_T, BLOCK_R, BLOCK_C, BLOCK_HALF, PDL,
        )  # fmt: skip
    else:
        _keys_part(
            kv, weight, positions, cos_sin, loc, cache, out, kv_token, cache_token, tokens,
            first_token + (part - PARTS) * _KEYS_AT_ONCE, eps, offset, inverse_scale,
            R, E, SCALED, INTERLEAVED, BLOCK_HALF, ALL_R, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _values_kernel(
    read,
    up,
    out,
    up_head,
    tokens,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has some tokens, and some of the V numbers of a head."""
    trigger(PDL)
    PER_HEAD: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(1) // PER_HEAD
    col = tl.program_id(1) % PER_HEAD * BLOCK_V + tl.arange(0, BLOCK_V)
    dim = tl.arange(0, BLOCK_R)
    up_at = up + head * up_head + (C + col)[None, :] * R + dim[:, None]
    up_tile = tl.load(up_at, mask=(dim < R)[:, None] & (col < V)[None, :], other=0.0)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = token < tokens
    wait(PDL)
    read_at = read + (token[:, None] * N + head) * R + dim[None, :]
    tile = tl.load(read_at, mask=here[:, None] & (dim < R)[None, :], other=0.0)
    made = tl.dot(tile, up_tile, input_precision=PRECISION)
    out_at = out + (token[:, None] * N + head) * V + col[None, :]
    tl.store(out_at, made.to(out.dtype.element_ty), mask=here[:, None] & (col < V)[None, :])


_ABSORB = Launcher(_absorb_kernel)
_VALUES = Launcher(_values_kernel)


def suits(q_TNH: Tensor, up_NXR: Tensor) -> bool:
    """Whether the tokens are few enough, and of the matrices' type."""
    few = 1 <= len(q_TNH) <= MOST_TOKENS
    return few and q_TNH.dtype == up_NXR.dtype and up_NXR.stride(2) == 1 and up_NXR.stride(1) == up_NXR.shape[2]


def absorb_and_write(raw: RawLatents, up_NXR: Tensor, loc_T: Tensor, cache: Tensor, *, scale: float) -> Tensor:
    """Queries [T, N, R + E] that read latents as they are. Latents are normed, keys rotated, and both go to `cache` ([pages,
    page size, 1, R + E]), to `loc_T`. `up_NXR`: of each head what makes keys of latents, then what makes values.
    """
    tokens, num_heads, width = raw.q_TNH.shape
    rank, rotated = up_NXR.shape[2], raw.cos_sin_PE.shape[1]
    out = raw.q_TNH.new_empty((tokens, num_heads, rank + rotated))
    block_t = _tokens_of(tokens)
    block_r = min(64, power_of_two(rank, 16))
    parts = num_heads * cdiv(rank, block_r) + cdiv(min(block_t, tokens), _KEYS_AT_ONCE.value)
    _ABSORB.launch(
        (cdiv(tokens, block_t), parts),
        (raw.q_TNH, raw.kv_TX, up_NXR, raw.norm_R, raw.positions_T, raw.cos_sin_PE, loc_T, cache, out),
        (raw.q_TNH.stride(0), raw.q_TNH.stride(1), raw.kv_TX.stride(0), up_NXR.stride(0), cache.stride(1)),
        (raw.eps, raw.offset, 1.0 / scale),
        (
            num_heads, rank, rotated, width - rotated, scale != 1.0, raw.interleaved, _precision(out), block_t, block_r,
            power_of_two(width - rotated, 16), power_of_two(rotated // 2), power_of_two(rank),
        ),
        num_warps=4,
        counts=(tokens,),
    )  # fmt: skip
    return out


def values(read_TNR: Tensor, up_NXR: Tensor, out_TNV: Tensor) -> None:
    """Fills `out_TNV` with what heads read, from sums of latents; both are contiguous."""
    tokens, num_heads, rank = read_TNR.shape
    v_dim = out_TNV.shape[2]
    block_t = _VALUED_AT_ONCE
    block_v = 16 if tokens <= 16 else 32
    _VALUES.launch(
        (cdiv(tokens, block_t), num_heads * cdiv(v_dim, block_v)),
        (read_TNR, up_NXR, out_TNV),
        (up_NXR.stride(0),),
        (),
        (
            num_heads,
            rank,
            up_NXR.shape[1] - v_dim,
            v_dim,
            _precision(out_TNV),
            block_t,
            block_v,
            power_of_two(rank, 16),
        ),
        num_warps=4,
        counts=(tokens,),
    )


def _tokens_of(tokens: int) -> int:
    """Tokens of a program before attention (see `MOST_TOKENS`)."""
    return 16 if tokens <= 48 else 64


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
