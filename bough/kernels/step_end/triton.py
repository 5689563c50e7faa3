# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The end of a step on the GPU: one launch, a thread for a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, wait
from bough.kernels.step_end import SampleInputs
from bough.kernels.step_start import SlotState

_BLOCK = 128


@triton.jit(do_not_specialize=["num_samples"])
def _advance_kernel(
    last_token,
    kv_len,
    num_output,
    positions,
    sample_at,
    sample_slots,
    counters,
    drawn,
    num_samples,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_samples
    wait(PDL)
    slot = tl.load(sample_slots + place, mask=inside, other=0)
    at = tl.load(sample_at + place, mask=inside, other=0)
    counter = tl.load(counters + place, mask=inside, other=0)
    token = tl.load(drawn + place, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=0)
    tl.store(last_token + slot, token, mask=inside)
    tl.store(kv_len + slot, position + 1, mask=inside)
    tl.store(num_output + slot, counter + 1, mask=inside)


_ADVANCE = Launcher(_advance_kernel)


def advance(state: SlotState, inputs: SampleInputs, drawn_L: Tensor) -> None:
    num_samples = len(drawn_L)
    if num_samples:
        _ADVANCE.launch(
            (cdiv(num_samples, _BLOCK), 1),
            (
                state.last_token, state.kv_len, state.num_output, inputs.positions_T, inputs.sample_at_L,
                inputs.sample_slots_L, inputs.counter_L, drawn_L,
            ),
            (),
            (),
            (_BLOCK,),
            num_warps=4,
            counts=(num_samples,),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "width"])
def _verify_kernel(
    last_token,
    kv_len,
    num_output,
    ids,
    positions,
    sample_at,
    sample_slots,
    counters,
    starts,
    drawn,
    blocked,
    out,
    num_rows,
    width,
    BLOCKED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    wait(PDL)
    first = tl.load(starts + row, mask=inside, other=0)
    count = tl.load(starts + row + 1, mask=inside, other=0) - first
    line = out + row.to(tl.int64) * (width + 1)
    yields = row * 0
    goes_on = count > 0
    newest = tl.zeros([BLOCK], tl.int64)
    for place in range(width):
        is_real = place < count
        token = tl.load(drawn + first + place, mask=is_real, other=-1)
        if BLOCKED:
            goes_on = goes_on & (tl.load(blocked + first + place, mask=is_real, other=1) == 0)
        goes_on = goes_on & is_real
        yields += goes_on.to(tl.int32)
        newest = tl.where(goes_on, token, newest)
        tl.store(line + 1 + place, token, mask=inside)
        has_next = place + 1 < count
        next_at = tl.load(sample_at + first + place + 1, mask=has_next, other=0)
        goes_on = goes_on & has_next & (tl.load(ids + next_at, mask=has_next, other=-1) == token)
    tl.store(line, yields.to(tl.int64), mask=inside)
    moves = yields > 0
    slot = tl.load(sample_slots + first, mask=moves, other=0)
    at = tl.load(sample_at + first, mask=moves, other=0)
    tl.store(last_token + slot, newest, mask=moves)
    tl.store(kv_len + slot, tl.load(positions + at, mask=moves, other=0) + yields, mask=moves)
    tl.store(num_output + slot, tl.load(counters + first, mask=moves, other=0) + yields, mask=moves)


_VERIFY = Launcher(_verify_kernel)


def verify(
    state: SlotState, inputs: SampleInputs, drawn_L: Tensor, num_rows: int, width: int, blocked_L: Tensor | None
) -> Tensor:
    out = torch.empty((num_rows, 1 + width), dtype=torch.int64, device=drawn_L.device)
    blocked = state.last_token if blocked_L is None else blocked_L.view(torch.uint8)
    _VERIFY.launch(
        (cdiv(num_rows, _BLOCK), 1),
        (
            state.last_token, state.kv_len, state.num_output, inputs.ids_T, inputs.positions_T, inputs.sample_at_L,
            inputs.sample_slots_L, inputs.counter_L, inputs.sample_start_R1, drawn_L, blocked, out,
        ),
        (),
        (),
        (blocked_L is not None, _BLOCK),
        num_warps=4,
        counts=(num_rows, width),
    )  # fmt: skip
    return out
