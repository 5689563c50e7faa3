# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The start of a step on the GPU: one launch of one program.

A decode row's token may go into a page whose table entry is written by the same step. One program can make the writes, wait
for its own threads, and look the entries up; several could not wait for each other. Tokens that are not derived need
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, wait
from bough.kernels.step_start import SlotState, StepInputs

_BLOCK = 1024
_WARPS = 8
_LOCATED_AT_ONCE = 256


@triton.jit(do_not_specialize=["num_writes", "table_stride", "drafts_stride", "page_size"])
def _start_kernel(
    table,
    last_token,
    kv_len,
    num_output,
    drafts,
    at,
    pages,
    derived,
    ids,
    positions,
    token_slots,
    loc,
    row_kv_len,
    row_slots,
    sample_slots,
    counters,
    num_writes,
    table_stride,
    drafts_stride,
    page_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Kernels of the layers read the table and the step's inputs before they wait: none of them may start while this one, or
    # one before it, still runs. So it waits first, and doesn't trigger.
    wait(PDL)
    lane = tl.arange(0, BLOCK)
    num_tokens = tl.load(derived)
    num_rows = tl.load(derived + 1)
    num_samples = tl.load(derived + 2)
    for base in range(0, num_writes, BLOCK):
        place = base + lane
        inside = place < num_writes
        target = tl.load(at + place, mask=inside, other=0)
        page = tl.load(pages + place, mask=inside, other=0)
        tl.store(table + target, page, mask=inside)
    tl.debug_barrier()
    for base in range(0, num_tokens, BLOCK):
        place = base + lane
        inside = place < num_tokens
        slot = tl.load(token_slots + place, mask=inside, other=0)
        given = tl.load(ids + place, mask=inside, other=0)
        room = tl.load(loc + place, mask=inside, other=0)
        position = tl.load(positions + place, mask=inside, other=0) + tl.load(kv_len + slot, mask=inside, other=0)
        last = tl.load(last_token + slot, mask=inside & (given == -1), other=0)
        draft = tl.load(drafts + slot * drafts_stride - 2 - given, mask=inside & (given < -1), other=0)
        tl.store(ids + place, tl.where(given == -1, last, draft), mask=inside & (given < 0))
        tl.store(positions + place, position, mask=inside)
        fits = inside & (position < room)
        page = tl.load(table + slot * table_stride + position // page_size, mask=fits, other=0).to(tl.int64)
        where = page * page_size + position % page_size
        tl.store(loc + place, tl.where(fits, where, -1), mask=inside)
    for base in range(0, num_rows, BLOCK):
        place = base + lane
        inside = place < num_rows
        slot = tl.load(row_slots + place, mask=inside, other=0)
        query = tl.load(row_kv_len + place, mask=inside, other=0)
        length = tl.load(kv_len + slot, mask=inside, other=0).to(tl.int32)
        tl.store(row_kv_len + place, length + query, mask=inside)
    for base in range(0, num_samples, BLOCK):
        place = base + lane
        inside = place < num_samples
        slot = tl.load(sample_slots + place, mask=inside, other=0)
        offset = tl.load(counters + place, mask=inside, other=0)
        tl.store(counters + place, tl.load(num_output + slot, mask=inside, other=0) + offset, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "table_stride", "page_size"])
def _locate_kernel(
    table, positions, token_slots, first_loc, loc, num_tokens, table_stride, page_size, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_tokens
    somewhere = inside & (tl.load(first_loc + place, mask=inside, other=-1) >= 0)
    position = tl.load(positions + place, mask=somewhere, other=0)
    slot = tl.load(token_slots + place, mask=somewhere, other=0)
    page = tl.load(table + slot * table_stride + position // page_size, mask=somewhere, other=0).to(tl.int64)
    tl.store(loc + place, tl.where(somewhere, page * page_size + position % page_size, -1), mask=inside)


def locate(state: SlotState, inputs: StepInputs, page_sizes: Sequence[int]) -> list[Tensor]:
    count = len(inputs.loc_T)
    located = []
    for table, page_size in zip(state.tables[1:], page_sizes[1:], strict=True):
        loc = torch.empty_like(inputs.loc_T)
        _locate_kernel[(cdiv(count, _LOCATED_AT_ONCE),)](
            table, inputs.positions_T, inputs.token_slots_T, inputs.loc_T, loc, count, table.stride(0), page_size,
            BLOCK=_LOCATED_AT_ONCE,
        )  # fmt: skip
        located.append(loc)
    return located


_START = Launcher(_start_kernel)


def start_step(state: SlotState, inputs: StepInputs, page_size: int) -> None:
    _START.launch(
        (1, 1),
        (
            state.table_entries, state.last_token, state.kv_len, state.num_output, state.drafts,
            inputs.table_at_U, inputs.table_pages_U, inputs.derived, inputs.ids_T, inputs.positions_T,
            inputs.token_slots_T, inputs.loc_T, inputs.kv_len_R, inputs.slots_R, inputs.sample_slots_L, inputs.counter_L,
        ),
        (),
        (),
        (_BLOCK,),
        num_warps=_WARPS,
        counts=(len(inputs.table_at_U), state.page_table.shape[1], state.drafts.shape[1], page_size),
    )  # fmt: skip
