# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Tokens laid out by expert, for grouped products of many tokens: all on the device, so that nothing waits for counts.

Every (token, expert) pair gets a *place*: a row of a matrix in which the rows of an expert lie together, from a multiple of
`ALIGN` on. A list of tiles says which stretches of rows belong to which expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, power_of_two, trigger, wait

ALIGN = 64
"""Experts' rows begin at multiples of it."""
_ALIGN = tl.constexpr(ALIGN)
_E4M3_MAX = tl.constexpr(448.0)
MOST_AT_ONCE = 2048
"""Pairs that one launch lays out: each of its programs counts all of them, in place of launches that zero, count and list.
Those and the copy took 14 us on an H200 with 1,600 pairs of 66 experts."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Where pairs lie, and the tiles that cover them."""

    places_Tk: Tensor
    """int32 [T, k]: the row of each pair; -1: its expert is held elsewhere."""
    tiles: Tensor
    """int32 [most tiles, 4]: first row, end of the expert's rows (a multiple of `ALIGN`), expert, nothing."""
    num_tiles: Tensor
    """int32 [1]."""
    num_rows: int
    """Room for all rows, however tokens were routed."""


@triton.jit(do_not_specialize=["P"])
def _count_kernel(ids, counts, E, P, BLOCK: tl.constexpr, PDL: tl.constexpr):
    trigger(PDL)
    wait(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    mine = (expert >= 0) & (expert < E)
    tl.atomic_add(counts + expert, 1, mask=mine, sem="relaxed")


@triton.jit
def _tiles_kernel(
    counts,
    cursors,
    tiles,
    num_tiles,
    E,
    height,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Turns counts into the first row of each expert, and into tiles of `height` rows."""
    trigger(PDL)
    wait(PDL)
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(counts + expert, mask=expert < E, other=0)
    room = (count + _ALIGN - 1) // _ALIGN * _ALIGN
    end = tl.cumsum(room, 0)
    tl.store(cursors + expert, end - room, mask=expert < E)
    own_tiles = (count + height - 1) // height
    tile_end = tl.cumsum(own_tiles, 0)
    total = tl.sum(own_tiles, 0)
    tl.store(num_tiles, total)
    for base in range(0, total, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        owner = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), 1)
        is_owner = expert[None, :] == owner[:, None]
        first_tile = tl.sum(tl.where(is_owner, (tile_end - own_tiles)[None, :], 0), 1)
        last_row = tl.sum(tl.where(is_owner, end[None, :], 0), 1)
        first_row = last_row - tl.sum(tl.where(is_owner, room[None, :], 0), 1)
        real = tile < total
        tl.store(tiles + tile * 4, first_row + (tile - first_tile) * height, mask=real)
        tl.store(tiles + tile * 4 + 1, last_row, mask=real)
        tl.store(tiles + tile * 4 + 2, owner, mask=real)


@triton.jit
def _gather_kernel(
    x,
    ids,
    cursors,
    places,
    out,
    scales,
    D,
    E,
    x_stride,
    PER_TOKEN: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Takes places for a token's pairs, and copies the token there; FP8: rounded, with a scale."""
    trigger(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BLOCK_K)
    col = tl.arange(0, BLOCK_D)
    inside = choice < PER_TOKEN
    expert = tl.load(ids + token * PER_TOKEN + choice, mask=inside, other=-1).to(tl.int32)
    mine = inside & (expert >= 0) & (expert < E)
    value = tl.load(x + token * x_stride + col, mask=col < D, other=0.0)
    place = tl.atomic_add(cursors + expert, 1, mask=mine, sem="relaxed")
    place = tl.where(mine, place, -1)
    tl.store(places + token * PER_TOKEN + choice, place, mask=inside)
    _copy_token(value, col, place, choice, mine, out, scales, D, PER_TOKEN, FP8, BLOCK_D)


@triton.jit(do_not_specialize=["T"])
def _group_kernel(
    x,
    ids,
    places,
    tiles,
    num_tiles,
    out,
    scales,
    D,
    E,
    height,
    x_stride,
    T,
    PER_TOKEN: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program a token and an expert: each counts the pairs of all experts, and so knows where its own go, in their order.
    It copies its token, and lists its expert's tiles of `height` rows."""
    trigger(PDL)
    wait(PDL)
    mine = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < T * PER_TOKEN, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < E), expert, E)
    each = tl.arange(0, BINS)
    count = tl.where(each < E, tl.histogram(expert, BINS), 0)
    room = (count + _ALIGN - 1) // _ALIGN * _ALIGN
    end = tl.cumsum(room, 0)
    if mine < T:
        token = mine.to(tl.int64)
        choice = tl.arange(0, BLOCK_K)
        col = tl.arange(0, BLOCK_D)
        inside = choice < PER_TOKEN
        value = tl.load(x + token * x_stride + col, mask=col < D, other=0.0)
        own_pair = mine * PER_TOKEN + choice
        own = tl.load(ids + own_pair, mask=inside, other=-1).to(tl.int32)
        is_here = inside & (own >= 0) & (own < E)
        before = (expert[:, None] == own[None, :]) & (pair[:, None] < own_pair[None, :])
        first = tl.sum(tl.where(each[:, None] == own[None, :], (end - room)[:, None], 0), 0)
        place = tl.where(is_here, first + tl.sum(before.to(tl.int32), 0), -1)
        tl.store(places + own_pair, place, mask=inside)
        _copy_token(value, col, place, choice, is_here, out, scales, D, PER_TOKEN, FP8, BLOCK_D)
    if mine < E:
        own_tiles = (count + height - 1) // height
        is_mine = each == mine
        first_tile = tl.sum(tl.where(each < mine, own_tiles, 0), 0)
        last_row = tl.sum(tl.where(is_mine, end, 0), 0)
        first_row = last_row - tl.sum(tl.where(is_mine, room, 0), 0)
        for place in range(tl.sum(tl.where(is_mine, own_tiles, 0), 0)):
            at = tiles + (first_tile + place) * 4
            tl.store(at, first_row + place * height)
            tl.store(at + 1, last_row)
            tl.store(at + 2, mine)
        if mine == 0:
            tl.store(num_tiles, tl.sum(own_tiles, 0))


@triton.jit
def _copy_token(
    value,
    col,
    place,
    choice,
    mine,
    out,
    scales,
    D,
    PER_TOKEN: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copies a token to the places of its pairs that are `mine`; FP8: rounded, with a scale."""
    if FP8:
        largest = tl.max(tl.abs(value.to(tl.float32)), 0)
        scale = tl.maximum(largest, 1e-12) / _E4M3_MAX
        value = (value.to(tl.float32) / scale).to(tl.float8e4nv)
        tl.store(scales + place, scale + place.to(tl.float32) * 0, mask=mine)
    for each in tl.static_range(PER_TOKEN):
        row = tl.max(tl.where(choice == each, place, -1), 0).to(tl.int64) + tl.zeros([BLOCK_D], tl.int64)
        tl.store(out + row * D + col, value, mask=(col < D) & (row >= 0))


@triton.jit
def _sum_kernel(parts, weights, places, out, D, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[token] = sum over its pairs of weight * parts[place]."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    trigger(PDL)
    wait(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + choice
        place = tl.load(places + pair).to(tl.int64) + tl.zeros([BLOCK], tl.int64)
        part = tl.load(parts + place * D + col, mask=(col < D) & (place >= 0), other=0.0).to(tl.float32)
        acc += part * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * D + col, acc.to(out.dtype.element_ty), mask=col < D)


@triton.jit
def _round_kernel(x, out, scales, D, BLOCK_D: tl.constexpr, PDL: tl.constexpr):
    """A row as e4m3, and what it is to be multiplied by."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_D)
    value = tl.load(x + row * D + col, mask=col < D, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / _E4M3_MAX
    tl.store(out + row * D + col, (value / scale).to(tl.float8e4nv), mask=col < D)
    tl.store(scales + row, scale)


_COUNT = Launcher(_count_kernel)
_TILES = Launcher(_tiles_kernel)
_GATHER = Launcher(_gather_kernel)
_GROUP = Launcher(_group_kernel)
_SUM = Launcher(_sum_kernel)
_ROUND = Launcher(_round_kernel)


def group_tokens(
    x_TD: Tensor, ids_Tk: Tensor, num_experts: int, height: int, *, fp8: bool = False
) -> tuple[Grouping, Tensor, Tensor | None]:
    """Lays tokens out by expert, for tiles of `height` rows. Returns (grouping, rows [num_rows, D], scales [num_rows]).

    Rows are of the type of x without scales, or with `fp8` e4m3 to be multiplied by their scales. Rows of no pair hold
    anything.
    """
    tokens, per_token = ids_Tk.shape
    pairs, depth, device = tokens * per_token, x_TD.shape[1], x_TD.device
    num_rows = cdiv(pairs + num_experts * (ALIGN - 1), ALIGN) * ALIGN
    most_tiles = min(pairs, pairs // height + num_experts)
    places = torch.empty((tokens, per_token), dtype=torch.int32, device=device)
    tiles = torch.empty((most_tiles, 4), dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    rows = torch.empty((num_rows, depth), dtype=torch.float8_e4m3fn if fp8 else x_TD.dtype, device=device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=device) if fp8 else None
    grouping = Grouping(places, tiles, num_tiles, num_rows)
    if pairs <= MOST_AT_ONCE:
        _GROUP.launch(
            (max(tokens, num_experts), 1),
            (x_TD, ids_Tk, places, tiles, num_tiles, rows, num_tiles if scales is None else scales),
            (depth, num_experts, height, x_TD.stride(0)),
            (),
            (
                per_token, fp8, power_of_two(pairs, at_least=256), power_of_two(num_experts + 1),
                power_of_two(per_token), power_of_two(depth),
            ),
            num_warps=8,
            counts=(tokens,),
        )  # fmt: skip
        return grouping, rows, scales
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    cursors = torch.empty(num_experts, dtype=torch.int32, device=device)
    _COUNT.launch((cdiv(pairs, 1024), 1), (ids_Tk, counts), (num_experts,), (), (1024,), num_warps=4, counts=(pairs,))
    block_e = power_of_two(num_experts)
    _TILES.launch(
        (1, 1), (counts, cursors, tiles, num_tiles), (num_experts, height), (), (64, block_e), num_warps=8
    )  # fmt: skip
    _GATHER.launch(
        (tokens, 1),
        (x_TD, ids_Tk, cursors, places, rows, cursors if scales is None else scales),
        (depth, num_experts, x_TD.stride(0)),
        (),
        (per_token, fp8, power_of_two(per_token), power_of_two(depth)),
        num_warps=4,
    )
    return grouping, rows, scales


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(rows as e4m3, float32 scale of each)."""
    count, width = rows.shape
    out = torch.empty((count, width), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    _ROUND.launch((count, 1), (rows, out, scales), (width,), (), (power_of_two(width),), num_warps=4)
    return out, scales


def sum_parts(parts: Tensor, weights_Tk: Tensor, grouping: Grouping, out_TD: Tensor) -> None:
    """Fills out_TD with the weighted sums of each token's rows of `parts`."""
    tokens, width = out_TD.shape
    block = min(1024, power_of_two(width))
    _SUM.launch(
        (tokens, cdiv(width, block)),
        (parts, weights_Tk, grouping.places_Tk, out_TD),
        (width,),
        (),
        (weights_Tk.shape[1], block),
        num_warps=4,
    )
