# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The start of a step on the GPU: one launch, a thread for a page-table write and a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, wait

_BLOCK = 128


@triton.jit(do_not_specialize=["num_writes", "num_tokens"])
def _start_kernel(
    table,
    at,
    pages,
    ids,
    slots,
    last_token,
    out,
    num_writes,
    num_tokens,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Kernels of the layers read the table and the step's inputs before they wait: none of them may start while this one, or
    # one before it, still runs. So it waits first, and doesn't trigger.
    wait(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    writes = place < num_writes
    token = place < num_tokens
    target = tl.load(at + place, mask=writes, other=0)
    page = tl.load(pages + place, mask=writes, other=0)
    given = tl.load(ids + place, mask=token, other=0)
    slot = tl.load(slots + place, mask=token, other=0)
    tl.store(table + target, page, mask=writes)
    sampled = tl.load(last_token + slot, mask=token & (given < 0), other=0)
    tl.store(out + place, tl.where(given < 0, sampled, given), mask=token)


_START = Launcher(_start_kernel)


def start_step(
    table_P: Tensor, at_U: Tensor, pages_U: Tensor, ids_T: Tensor, slots_T: Tensor, last_token_S: Tensor
) -> Tensor:
    num_writes, num_tokens = len(at_U), len(ids_T)
    out = torch.empty_like(ids_T)
    _START.launch(
        (cdiv(max(num_writes, num_tokens, 1), _BLOCK), 1),
        (table_P, at_U, pages_U, ids_T, slots_T, last_token_S, out),
        (),
        (),
        (_BLOCK,),
        num_warps=4,
        counts=(num_writes, num_tokens),
    )
    return out
