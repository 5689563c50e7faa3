# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention within segments on the GPU: one program a head and a tile of queries, over the keys of the tile's segment.

Widths of heads need not be powers of two (72, 80): a head is computed as two pieces, the largest power of two and the rest,
where one padded piece would multiply up to 1.8 times as much. Segments are cut into tiles once for all layers of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, power_of_two, trigger, wait

_LOG2E = 1.4426950408889634
_LEAST_PIECE = 16
"""The narrowest matrix that a product takes."""


@triton.jit
def _load(base, at, token, seen, dim, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[tokens, BLOCK]: a piece of WIDTH values of the tokens `at`; zeros beyond it and, if MASKED, of tokens not `seen`."""
    where = base + at[:, None] * token + dim[None, :]
    if MASKED and BLOCK != WIDTH:
        return tl.load(where, mask=seen[:, None] & (dim < WIDTH)[None, :], other=0.0)
    elif MASKED:  # noqa: RET505 - Triton needs one return a branch
        return tl.load(where, mask=seen[:, None], other=0.0)
    elif BLOCK != WIDTH:
        return tl.load(where, mask=(dim < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def _attend_blocks(
    acc,
    acc_rest,
    high,
    norm,
    q,
    q_rest,
    k,
    v,
    begin,
    end,
    last,
    k_token,
    v_token,
    scale_log2,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Online softmax over the keys begin .. end, whole blocks of them; with MASKED those from `last` on are not seen."""
    dim, rest = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_R)
    for first in tl.range(begin, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        at, seen = tokens.to(tl.int64), tokens < last
        keys = _load(k, at, k_token, seen, dim, WIDTH, BLOCK_W, MASKED)
        score = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if REST:
            keys_rest = _load(k + WIDTH, at, k_token, seen, rest, REST, BLOCK_R, MASKED)
            score = tl.dot(q_rest, tl.trans(keys_rest), score, input_precision=PRECISION)
        score *= scale_log2
        if MASKED:
            score = tl.where(seen[None, :], score, float("-inf"))
        new_high = tl.maximum(high, tl.max(score, 1))  # a block has one key at least that is seen
        weight = tl.exp2(score - new_high[:, None])
        shrink = tl.exp2(high - new_high)
        norm = norm * shrink + tl.sum(weight, 1)
        weight = weight.to(q.dtype)
        values = _load(v, at, v_token, seen, dim, WIDTH, BLOCK_W, MASKED)
        acc = tl.dot(weight, values, acc * shrink[:, None], input_precision=PRECISION)
        if REST:
            values_rest = _load(v + WIDTH, at, v_token, seen, rest, REST, BLOCK_R, MASKED)
            acc_rest = tl.dot(weight, values_rest, acc_rest * shrink[:, None], input_precision=PRECISION)
        high = new_high
    return acc, acc_rest, high, norm


@triton.jit
def _segments_kernel(
    q,
    k,
    v,
    out,
    tiles,
    q_token,
    k_token,
    v_token,
    scale_log2,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    head_at = head * (WIDTH + REST)
    trigger(PDL)
    wait(PDL)
    first, segment, last = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    queries = first + tl.arange(0, BLOCK_M)
    dim, rest = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_R)
    at, asked = queries.to(tl.int64), queries < last
    q_tile = _load(q + head_at, at, q_token, asked, dim, WIDTH, BLOCK_W, True)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    if REST:
        q_rest = _load(q + head_at + WIDTH, at, q_token, asked, rest, REST, BLOCK_R, True)
        acc_rest = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    else:
        q_rest, acc_rest = q_tile, 0.0
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    k_base, v_base = k + head_at, v + head_at
    whole = segment + (last - segment) // BLOCK_N * BLOCK_N
    acc, acc_rest, high, norm = _attend_blocks(
        acc, acc_rest, high, norm, q_tile, q_rest, k_base, v_base, segment, whole, last, k_token, v_token, scale_log2,
        False, PRECISION, WIDTH, REST, BLOCK_N, BLOCK_W, BLOCK_R,
    )  # fmt: skip
    acc, acc_rest, high, norm = _attend_blocks(
        acc, acc_rest, high, norm, q_tile, q_rest, k_base, v_base, whole, last, last, k_token, v_token, scale_log2,
        True, PRECISION, WIDTH, REST, BLOCK_N, BLOCK_W, BLOCK_R,
    )  # fmt: skip
    to = out + (at * (HEADS * (WIDTH + REST)) + head_at)[:, None]
    share = 1.0 / norm[:, None]
    tl.store(to + dim[None, :], (acc * share).to(out.dtype.element_ty), mask=asked[:, None] & (dim < WIDTH)[None, :])
    if REST:
        value = (acc_rest * share).to(out.dtype.element_ty)
        tl.store(to + WIDTH + rest[None, :], value, mask=asked[:, None] & (rest < REST)[None, :])


_SEGMENTS = Launcher(_segments_kernel)


@dataclass(frozen=True, slots=True)
class SegmentTiling:
    """How many queries a program has, and how many keys at a time."""

    queries: int
    keys: int
    num_warps: int


SHORT = SegmentTiling(64, 64, 4)
LONG = SegmentTiling(128, 64, 8)


def tiling_for(longest: int) -> SegmentTiling:
    """For segments of at most this many tokens."""
    return SHORT if longest <= SHORT.queries else LONG


def pieces(head_dim: int) -> tuple[int, int]:
    """Widths of the two pieces of a head."""
    first = power_of_two(head_dim + 1) // 2
    return (head_dim, 0) if first < _LEAST_PIECE else (first, head_dim - first)


@lru_cache(maxsize=64)
def tiles_of(lengths: tuple[int, ...], queries: int, device: torch.device) -> Tensor:
    """int32 [tiles, 3]: a tile's first token, and where its segment begins and ends; those with most keys first. Kept,
    because all layers of a pass ask for the same."""
    sizes = np.array(lengths, np.int64)
    ends = sizes.cumsum()
    counts = -(-sizes // queries)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    segment, last = np.repeat(ends - sizes, counts), np.repeat(ends, counts)
    tiles = np.stack([segment + number * queries, segment, last], 1)[np.argsort(segment - last, kind="stable")]
    host = torch.from_numpy(tiles.astype(np.int32))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def attend_segments(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    return attend(q_TNH, k_TNH, v_TNH, tuple(lengths), scale, tiling_for(max(lengths, default=0)))


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: tuple[int, ...], scale: float, tiling: SegmentTiling
) -> Tensor:
    """`attend_segments` in this tiling."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    q_TNH, k_TNH, v_TNH = (_dense_heads(each) for each in (q_TNH, k_TNH, v_TNH))
    out_TO = q_TNH.new_empty(num_tokens, num_heads * head_dim)
    tiles = tiles_of(lengths, tiling.queries, q_TNH.device)
    if not len(tiles):
        return out_TO
    width, rest = pieces(head_dim)
    blocks = (power_of_two(width, _LEAST_PIECE), power_of_two(rest, _LEAST_PIECE))
    precision = "ieee" if q_TNH.dtype == torch.float32 else "tf32"
    _SEGMENTS.launch(
        (len(tiles), num_heads),
        (q_TNH, k_TNH, v_TNH, out_TO, tiles),
        (q_TNH.stride(0), k_TNH.stride(0), v_TNH.stride(0)),
        (scale * _LOG2E,),
        (num_heads, width, rest, precision, tiling.queries, tiling.keys, *blocks),
        tiling.num_warps,
    )
    return out_TO


def _dense_heads(x_TNH: Tensor) -> Tensor:
    """Heads of a token one behind the other, as in a fused projection: where they begin is known to be aligned."""
    return x_TNH if x_TNH.stride()[1:] == (x_TNH.shape[2], 1) else x_TNH.contiguous()
