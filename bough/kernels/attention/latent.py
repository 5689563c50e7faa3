# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Latents (MLA) on the GPU: what precedes attention in one launch, and attention over keys and values made of latents.

Many queries of a row are answered with less arithmetic if each head's keys and values are made of the latents first
("expanded": 192 + 128 numbers of a pair of query and key instead of 576 + 512); few are answered by reading latents as they
are (`triton.attend`). N heads, R width of a latent, E width of the rotated part of a key, C of the rest, V width of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, pdl_options, power_of_two, trigger, wait
from bough.kernels.rotary.triton import to_cache

_HEADS = 8
"""Heads whose queries a program rotates."""
_LOG2E = tl.constexpr(1.4426950408889634)


class LatentTiling(NamedTuple):
    """How queries and keys are cut, for queries of 2 bytes a number or of 4."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_SHORT, _LONG, _EXACT = LatentTiling(64, 64, 4, 3), LatentTiling(128, 64, 8, 3), LatentTiling(64, 32, 8, 1)
"""Of at most 64 queries a row, of more; and of float32, whose products go by way of registers: blocks of twice the bytes
must leave room for the queries in 99 KiB of shared memory."""


@triton.jit(do_not_specialize=["front"])
def _latent_kernel(
    q,
    kv,
    weight,
    positions,
    cos_sin,
    loc,
    cache,
    q_out,
    k_out,
    q_token,
    q_head,
    kv_token,
    cache_token,
    front,
    eps,
    offset,
    inverse_scale,
    N: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    SCALED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    HALF: tl.constexpr = E // 2
    trigger(PDL)
    position = tl.load(positions + token).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    cos = tl.load(cos_sin + position * E + half, mask=in_half, other=0.0)
    sin = tl.load(cos_sin + position * E + HALF + half, mask=in_half, other=0.0)
    if INTERLEAVED:
        first, second = 2 * half, 2 * half + 1
    else:
        first, second = half, half + HALF
    wait(PDL)
    DTYPE: tl.constexpr = k_out.dtype.element_ty
    if part == 0:
        dim = tl.arange(0, BLOCK_R)
        in_rank = dim < R
        x = tl.load(kv + token * kv_token + dim, mask=in_rank, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / R + eps)
        factor = tl.load(weight + dim, mask=in_rank, other=0.0).to(tl.float32) + offset
        latent = (x * scale * factor).to(DTYPE)
        rotated = kv + token * kv_token + R
        k_a = tl.load(rotated + first, mask=in_half, other=0.0).to(tl.float32)
        k_b = tl.load(rotated + second, mask=in_half, other=0.0).to(tl.float32)
        turned_k_a = (k_a * cos - k_b * sin).to(DTYPE)
        turned_k_b = (k_b * cos + k_a * sin).to(DTYPE)
        out = k_out + token * (R + E)
        tl.store(out + dim, latent, mask=in_rank)
        tl.store(out + R + first, turned_k_a, mask=in_half)
        tl.store(out + R + second, turned_k_b, mask=in_half)
        at = tl.load(loc + token).to(tl.int64)
        if at >= 0:
            CACHE: tl.constexpr = cache.dtype.element_ty
            place = cache + at * cache_token
            tl.store(place + dim, to_cache(latent, inverse_scale, SCALED, CACHE), mask=in_rank)
            tl.store(place + R + first, to_cache(turned_k_a, inverse_scale, SCALED, CACHE), mask=in_half)
            tl.store(place + R + second, to_cache(turned_k_b, inverse_scale, SCALED, CACHE), mask=in_half)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < N)[:, None] & in_half[None, :]
        base = q + token * q_token + head[:, None] * q_head + C
        a = tl.load(base + first[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(base + second[None, :], mask=inside, other=0.0).to(tl.float32)
        turned_a = (a * cos[None, :] - b * sin[None, :]).to(DTYPE)
        turned_b = (b * cos[None, :] + a * sin[None, :]).to(DTYPE)
        tl.debug_barrier()  # all of a query has been read before any of it is written
        tl.store(base + first[None, :], turned_a, mask=inside)
        tl.store(base + second[None, :], turned_b, mask=inside)
        if token < front:
            base = q_out + token * (N * (R + E)) + head[:, None] * (R + E) + R
            tl.store(base + first[None, :], turned_a, mask=inside)
            tl.store(base + second[None, :], turned_b, mask=inside)


_LATENT = Launcher(_latent_kernel)


def norm_rope_write(
    q_TNH: Tensor,
    kv_TX: Tensor,
    weight_R: Tensor,
    positions_T: Tensor,
    cos_sin_PE: Tensor,
    loc_T: Tensor,
    cache: Tensor,
    *,
    front: int,
    eps: float,
    offset: float,
    scale: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """(queries [front, N, R + E], of which the last E numbers are filled; keys [T, 1, R + E]).

    `kv_TX` has a latent, which is normed, and a key, which is rotated; both go to `cache` ([pages, page size, 1, R + E]), to
    `loc_T`. Queries are rotated in place, and those of the first `front` tokens into the first result as well.
    """
    tokens, num_heads, width = q_TNH.shape
    rank, rotated = weight_R.shape[0], cos_sin_PE.shape[1]
    q_out = q_TNH.new_empty((front, num_heads, rank + rotated))
    k_out = kv_TX.new_empty((tokens, 1, rank + rotated))
    if tokens:
        heads = min(_HEADS, power_of_two(num_heads))
        _LATENT.launch(
            (tokens, 1 + cdiv(num_heads, heads)),
            (q_TNH, kv_TX, weight_R, positions_T, cos_sin_PE, loc_T, cache, q_out if front else q_TNH, k_out),
            (q_TNH.stride(0), q_TNH.stride(1), kv_TX.stride(0), cache.stride(1)),
            (eps, offset, 1.0 / scale),
            (
                num_heads, rank, rotated, width - rotated, scale != 1.0, interleaved, heads, power_of_two(rank),
                power_of_two(rotated // 2),
            ),
            num_warps=2,
            counts=(front,),
        )  # fmt: skip
    return q_out, k_out


@triton.jit(do_not_specialize=["row", "kv_first", "kv_tokens", "least_query", "most_query", "offset"])
def _expanded_kernel(
    q,
    k,
    rotated,
    v,
    out,
    lse,
    query_start,
    kv_len,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    rotated_token,
    row,
    kv_first,
    kv_tokens,
    least_query,
    most_query,
    offset,
    scale_log2,
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    FRESH: tl.constexpr,
    BEGINS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries of one row, or with FRESH of a row for each program_id(2): of those without context and with at least
    `least_query` and at most `most_query` of them.

    With FRESH, keys stand where their row's queries do, and all tensors begin with the step's token `offset`; otherwise keys
    are the row's tokens from `kv_first` on. With PARTIAL the result is merged with that of earlier keys; `out` is float32.
    """
    trigger(PDL)
    head = tl.program_id(1)
    if FRESH:
        row += tl.program_id(2)
    start = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1) - start
    start -= offset
    context = tl.load(kv_len + row) - queries
    # Tiles with the most keys come first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    wait(PDL)
    mine = tile < queries
    if FRESH:
        mine = mine & (context == 0) & (queries >= least_query) & (queries <= most_query)
        kv_base = start.to(tl.int64)
        kv_tokens = queries
    else:
        kv_base = tl.cast(0, tl.int64)
        kv_tokens = tl.minimum(kv_tokens, context + queries - kv_first)
    if mine:
        lane = tl.arange(0, BLOCK_M)
        nope, turned, wide = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_V)
        valid = tile + lane < queries
        token = (start + tile + lane).to(tl.int64)
        q_at = q + token[:, None] * q_token + head * q_head
        q_c = tl.load(q_at + nope[None, :], mask=valid[:, None] & (nope < C)[None, :], other=0.0)
        q_e = tl.load(q_at + C + turned[None, :], mask=valid[:, None] & (turned < E)[None, :], other=0.0)
        position = context + tile + lane - kv_first
        end = tl.minimum(kv_tokens, context + tile + BLOCK_M - kv_first)
        full = tl.minimum(kv_tokens, tl.maximum(context + tile + 1 - kv_first, 0)) // BLOCK_N * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        k_at = k + kv_base * k_token + head * k_head
        v_at = v + kv_base * v_token + head * v_head
        e_at = rotated + kv_base * rotated_token
        acc, high, norm = _expanded_blocks(
            acc, high, norm, q_c, q_e, position, k_at, e_at, v_at, 0, full, end, k_token, rotated_token, v_token,
            scale_log2, False, C, E, V, PRECISION, BLOCK_N, BLOCK_C, BLOCK_E, BLOCK_V,
        )  # fmt: skip
        acc, high, norm = _expanded_blocks(
            acc, high, norm, q_c, q_e, position, k_at, e_at, v_at, full, end, end, k_token, rotated_token, v_token,
            scale_log2, True, C, E, V, PRECISION, BLOCK_N, BLOCK_C, BLOCK_E, BLOCK_V,
        )  # fmt: skip
        if PARTIAL:
            row_at = tile + lane
            lse_at = lse + row_at * N + head
            out_at = out + (row_at.to(tl.int64) * N + head)[:, None] * V + wide[None, :]
        else:
            lse_at = lse + lane
            out_at = out + (token * N + head)[:, None] * V + wide[None, :]
        inside = valid[:, None] & (wide < V)[None, :]
        safe = tl.where(norm > 0.0, norm, 1.0)
        result = acc / safe[:, None]
        if PARTIAL:
            mine_lse = tl.where(norm > 0.0, high + tl.log2(safe), float("-inf"))
            if not BEGINS:
                before = tl.load(lse_at, mask=valid, other=float("-inf"))
                top = tl.maximum(before, mine_lse)
                top = tl.where(top == float("-inf"), 0.0, top)
                old, new = tl.exp2(before - top), tl.exp2(mine_lse - top)
                both = old + new
                both_safe = tl.where(both > 0.0, both, 1.0)
                earlier = tl.load(out_at, mask=inside, other=0.0)
                result = (earlier * old[:, None] + result * new[:, None]) / both_safe[:, None]
                mine_lse = tl.where(both > 0.0, top + tl.log2(both_safe), float("-inf"))
            tl.store(lse_at, mine_lse, mask=valid)
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expanded_blocks(
    acc,
    high,
    norm,
    q_c,
    q_e,
    position,
    k,
    rotated,
    v,
    low,
    stop,
    end,
    k_token,
    rotated_token,
    v_token,
    scale_log2,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Online softmax over keys low .. stop, of which those from `end` on do not exist."""
    nope, turned, wide = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_V)
    for n in tl.range(low, stop, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        here = (key < end) if MASKED else (key >= 0)
        at = key.to(tl.int64)
        if MASKED or BLOCK_C != C:
            k_c = tl.load(
                k + at[None, :] * k_token + nope[:, None], mask=here[None, :] & (nope < C)[:, None], other=0.0
            )
        else:
            k_c = tl.load(k + at[None, :] * k_token + nope[:, None])
        if MASKED or BLOCK_E != E:
            inside = here[None, :] & (turned < E)[:, None]
            k_e = tl.load(rotated + at[None, :] * rotated_token + turned[:, None], mask=inside, other=0.0)
        else:
            k_e = tl.load(rotated + at[None, :] * rotated_token + turned[:, None])
        score = tl.dot(q_c, k_c, input_precision=PRECISION)
        score = tl.dot(q_e, k_e, score, input_precision=PRECISION) * scale_log2
        if MASKED:
            score = tl.where(here[None, :] & (key[None, :] <= position[:, None]), score, float("-inf"))
        new_high = tl.maximum(high, tl.max(score, 1))
        anchor = tl.where(new_high == float("-inf"), 0.0, new_high) if MASKED else new_high
        weight = tl.exp2(score - anchor[:, None])
        shrink = tl.exp2(high - anchor)
        norm = norm * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        if MASKED or BLOCK_V != V:
            inside = here[:, None] & (wide < V)[None, :]
            values = tl.load(v + at[:, None] * v_token + wide[None, :], mask=inside, other=0.0)
        else:
            values = tl.load(v + at[:, None] * v_token + wide[None, :])
        acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
        high = new_high
    return acc, high, norm


def attend_expanded(
    q_TNH: Tensor,
    k_SNC: Tensor,
    rotated_SE: Tensor,
    v_SNV: Tensor,
    query_start_R1: Tensor,
    kv_len_R: Tensor,
    out_TNV: Tensor,
    *,
    scale: float,
    most_query: int,
    rows: int = 1,
    row: int = 0,
    offset: int = 0,
    fresh_from: int | None = None,
    first_key: int = 0,
    partial_lse: Tensor | None = None,
) -> None:
    """Attends for rows `row` to `row + rows - 1`.

    With `fresh_from`, for those of them without context, with that many queries or more and at most `most_query`: keys stand
    where their queries do in the step, and all tensors begin with its token `offset`.

    Otherwise for one row, whose KV tokens from `first_key` on the keys are. With `partial_lse` (float32 [most_query, N])
    they are not all, and `out_TNV` (float32 [most_query, N, V]) is merged with what it holds unless `first_key` is 0.
    """
    _, num_heads, width = q_TNH.shape
    keys, _, nope = k_SNC.shape
    v_width, rotated = v_SNV.shape[2], width - nope
    is_exact = q_TNH.dtype == torch.float32
    tiling = _EXACT if is_exact else _SHORT if most_query <= _SHORT.block_m else _LONG
    _expanded_kernel[(cdiv(most_query, tiling.block_m), num_heads, rows)](
        q_TNH,
        k_SNC,
        rotated_SE,
        v_SNV,
        out_TNV,
        out_TNV if partial_lse is None else partial_lse,
        query_start_R1,
        kv_len_R,
        q_TNH.stride(0),
        q_TNH.stride(1),
        k_SNC.stride(0),
        k_SNC.stride(1),
        v_SNV.stride(0),
        v_SNV.stride(1),
        rotated_SE.stride(0),
        row,
        first_key,
        keys,
        fresh_from or 0,
        most_query,
        offset,
        scale * _LOG2E.value,
        N=num_heads,
        C=nope,
        E=rotated,
        V=v_width,
        FRESH=fresh_from is not None,
        BEGINS=first_key == 0,
        PARTIAL=partial_lse is not None,
        PRECISION="ieee" if is_exact else "tf32",
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_C=power_of_two(nope, 16),
        BLOCK_E=power_of_two(rotated, 16),
        BLOCK_V=power_of_two(v_width, 16),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **pdl_options(q_TNH.device),
    )
