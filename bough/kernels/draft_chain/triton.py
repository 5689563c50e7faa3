# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Chains of drafts on the GPU: one launch for where all drafts of a step stand, one for what a head reads.

With one request a draft of a one-layer head takes about 0.2 ms, so that each small kernel between its products is 1 % of
it, and every kernel without programmatic launch keeps the product behind it from reading weights meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.draft_chain import Ahead, ChainPages, ChainRows, ChainSide, reference
from bough.kernels.launching import Launcher, cdiv, power_of_two, trigger, wait, warps_for

_ROWS = 128
"""Of a program."""


@triton.jit(do_not_specialize=["R", "stride", "spare", "pages", "table_stride", "page_size"])
def _ahead_kernel(
    slots,
    kv_len,
    counter,
    room,
    table,
    positions,
    counters,
    loc,
    seen,
    starts,
    small_slots,
    R,
    stride,
    spare,
    pages,
    table_stride,
    page_size,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Attention reads all of this before it waits: nothing may start while this runs.
    wait(PDL)
    place = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < R
    slot = tl.load(slots + row, mask=inside, other=0)
    position = tl.load(kv_len + row, mask=inside, other=0) + place
    most = tl.load(room + slot, mask=inside, other=0)
    real = inside & (slot != spare)
    fits = real & (position < most)
    at = tl.minimum(position // page_size, pages - 1)
    page = tl.load(table + slot * table_stride + at, mask=fits, other=0).to(tl.int64)
    sees = tl.maximum(tl.minimum(position + 1, most), 1)
    to = place.to(tl.int64) * stride + row
    tl.store(positions + to, position, mask=inside)
    tl.store(counters + to, tl.load(counter + row, mask=inside, other=0) + place, mask=inside)
    tl.store(loc + to, tl.where(fits, page * page_size + position % page_size, -1), mask=inside)
    tl.store(seen + to, tl.where(real, sees, 1).to(tl.int32), mask=inside)
    if place == 0:
        tl.store(starts + row, row, mask=row <= R)
        tl.store(small_slots + row, slot.to(tl.int32), mask=inside)


_AHEAD = Launcher(_ahead_kernel)


def look_ahead(rows: ChainRows, pages: ChainPages, places: int) -> Ahead:
    count, device = len(rows.slots_R), rows.slots_R.device
    stride = count + -count % 4
    longs = torch.empty((3, places, stride), dtype=torch.int64, device=device)
    positions, counters, loc = longs
    seen = torch.empty((places, stride), dtype=torch.int32, device=device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=device)
    slots = torch.empty(count, dtype=torch.int32, device=device)
    table = pages.page_table
    _AHEAD.launch(
        (places, cdiv(count + 1, _ROWS)),
        (
            rows.slots_R, rows.kv_len_R, rows.counter_R, pages.room, table, positions, counters, loc, seen, starts, slots
        ),
        (),
        (),
        (_ROWS,),
        num_warps=4,
        counts=(count, stride, len(pages.room) - 1, table.shape[1], table.stride(0), pages.page_size),
    )  # fmt: skip
    some = slice(count)
    return Ahead(positions[:, some], counters[:, some], seen[:, some], loc[:, some], starts, slots)


@triton.jit
def _vector(x, at, weight, out, row, stride, eps, offset, W: tl.constexpr, GATHERED: tl.constexpr, NORMED: tl.constexpr,
            BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token's vector, normed."""
    col = tl.arange(0, BLOCK)
    inside = col < W
    w = tl.full([BLOCK], 1.0, tl.float32)
    if NORMED:
        w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32) + offset
    wait(PDL)
    # Only now: attention behind the next product reads pages before it waits, and a draft before may just write to them.
    trigger(PDL)
    source = row
    if GATHERED:
        source = tl.load(at + row)
    value = tl.load(x + source * stride + col, mask=inside, other=0.0)
    if NORMED:
        wide = value.to(tl.float32)
        value = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / W + eps) * w).to(out.dtype.element_ty)
    tl.store(out + col, value, mask=inside)


@triton.jit
def _side_kernel(
    left,
    left_at,
    left_weight,
    right,
    right_at,
    right_weight,
    out,
    left_stride,
    right_stride,
    left_eps,
    left_offset,
    right_eps,
    right_offset,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LEFT_GATHERED: tl.constexpr,
    RIGHT_GATHERED: tl.constexpr,
    LEFT_NORMED: tl.constexpr,
    RIGHT_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out += row * (LEFT + RIGHT)
    if tl.program_id(1) == 0:
        _vector(
            left, left_at, left_weight, out, row, left_stride, left_eps, left_offset, LEFT, LEFT_GATHERED, LEFT_NORMED,
            BLOCK, PDL,
        )  # fmt: skip
    else:
        _vector(
            right, right_at, right_weight, out + LEFT, row, right_stride, right_eps, right_offset, RIGHT, RIGHT_GATHERED,
            RIGHT_NORMED, BLOCK, PDL,
        )  # fmt: skip


_SIDES = Launcher(_side_kernel)


def side_by_side(left: ChainSide, right: ChainSide) -> Tensor:
    sides = (left, right)
    if any(side.x.dim() != 2 or side.x.stride(1) != 1 for side in sides) or left.x.dtype != right.x.dtype:
        return reference.side_by_side(left, right)
    x, widths = left.x, (left.x.shape[1], right.x.shape[1])
    count = len(left.x) if left.at_T is None else len(left.at_T)
    out = x.new_empty((count, sum(widths)))
    if not count:
        return out
    block = power_of_two(max(widths))
    tensors: list[Tensor] = []
    for side in sides:
        tensors += (side.x, x if side.at_T is None else side.at_T, x if side.weight_W is None else side.weight_W)
    _SIDES.launch(
        (count, 2),
        (*tensors, out),
        (left.x.stride(0), right.x.stride(0)),
        (left.eps, left.offset, right.eps, right.offset),
        (
            *widths, *(side.at_T is not None for side in sides), *(side.weight_W is not None for side in sides), block
        ),
        warps_for(block),
    )  # fmt: skip
    return out
