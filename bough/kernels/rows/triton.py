# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Few rows of one or two tables in a launch. Torch takes a launch for each table, with which the kernels around it can't
overlap, and on an H200 10.5 us for 16 rows of 8 KiB (2.1 for one, 1.8 from 24 on)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, trigger, wait
from bough.kernels.rows import reference

_MOST_ROWS: Final = 256
"""Beyond, a launch is short beside what it copies."""
_BLOCK: Final = 1024
"""Values that a program copies."""


@triton.jit
def _take_kernel(
    at,
    first,
    second,
    to_first,
    to_second,
    first_stride,
    second_stride,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of a row: FIRST and SECOND are the tables' widths, parts of the second one come behind those of the first."""
    wait(PDL)
    # Only now: a pass begins with this, and attention reads pages before it waits, to which the pass before may just write.
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = (FIRST + BLOCK - 1) // BLOCK
    part = tl.program_id(1)
    source = tl.load(at + row).to(tl.int64)
    col = tl.arange(0, BLOCK)
    if part < PARTS:
        col += part * BLOCK
        value = tl.load(first + source * first_stride + col, mask=col < FIRST)
        tl.store(to_first + row * FIRST + col, value, mask=col < FIRST)
    else:
        col += (part - PARTS) * BLOCK
        value = tl.load(second + source * second_stride + col, mask=col < SECOND)
        tl.store(to_second + row * SECOND + col, value, mask=col < SECOND)


_TAKE = Launcher(_take_kernel)


def take_rows(at_T: Tensor, *tables: Tensor) -> list[Tensor]:
    plain = at_T.dim() == 1 and 0 < len(at_T) <= _MOST_ROWS and at_T.is_contiguous()
    if not plain or len(tables) > 2 or any(table.dim() != 2 or table.stride(1) != 1 for table in tables):
        return reference.take_rows(at_T, *tables)
    made = [table.new_empty(len(at_T), table.shape[1]) for table in tables]
    first, last = tables[0], tables[-1]
    width, second = first.shape[1], last.shape[1] if len(tables) == 2 else 0
    _TAKE.launch(
        (len(at_T), cdiv(width, _BLOCK) + cdiv(second, _BLOCK)),
        (at_T, first, last, made[0], made[-1]),
        (first.stride(0), last.stride(0)),
        (),
        (width, second, _BLOCK),
        num_warps=4,
    )
    return made
