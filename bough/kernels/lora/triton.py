# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Adapters on the GPU: one kernel makes the inputs narrow, a second one makes them wide and adds them.

A program has a tile of neighbouring tokens, and looks at each slot in turn: if a token of the tile has it, all of the tile
is multiplied, and lines of other tokens are left out. Tokens of a row are neighbours, so that a tile of a prompt has one
adapter, or two; a tile of decode rows reads each adapter that it has once. Nothing is sorted, and what is launched depends
on sizes only. A tile without adapters ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import cdiv
from bough.kernels.lora import LoraStack, TokenAdapters

_MOST_SPLITS = 8
"""Parts of the inputs that programs share, where tokens are few: what they have made is summed by the second kernel."""
_FEW_TOKENS = 64


@triton.jit
def _narrow_kernel(
    x, a, of, ranks, offsets, narrow, T, D, x_line, a_line, PIECE,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """narrow[split, t, part, r] = sum over a piece of the inputs of x[t] a[slot of t, part, r], in float32."""
    blocks = tl.cdiv(MOST, RANKS)
    at_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    split = tl.program_id(2)
    at_R = block * RANKS + tl.arange(0, RANKS)
    of_T = tl.load(of + at_T, mask=at_T < T, other=0)
    for slot in range(SLOTS):
        mine_T = of_T == slot + 1
        rank = tl.load(ranks + slot)
        if (tl.max(mine_T.to(tl.int32), 0) > 0) & (block * RANKS < rank):
            line_R = (tl.load(offsets + slot) * PARTS + part * rank + at_R).to(tl.int64)
            total_TR = tl.zeros([TOKENS, RANKS], tl.float32)
            for first in range(split * PIECE, tl.minimum(D, (split + 1) * PIECE), DEPTH):
                in_D = first + tl.arange(0, DEPTH)
                inside_D = in_D < D
                x_TD = tl.load(
                    x + at_T.to(tl.int64)[:, None] * x_line + in_D[None, :],
                    mask=mine_T[:, None] & inside_D[None, :], other=0.0,
                )  # fmt: skip
                a_DR = tl.load(
                    a + line_R[None, :] * a_line + in_D[:, None],
                    mask=(at_R < rank)[None, :] & inside_D[:, None], other=0.0,
                )  # fmt: skip
                total_TR = tl.dot(x_TD, a_DR, total_TR, input_precision="ieee")
            to = narrow + ((split * T + at_T.to(tl.int64)[:, None]) * PARTS + part) * MOST + at_R[None, :]
            tl.store(to, total_TR, mask=mine_T[:, None] & (at_R < rank)[None, :])


@triton.jit
def _wide_kernel(
    out, narrow, b, of, ranks, offsets, scales, starts, T, out_line, b_line,
    SPLITS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[t, o] += scale * sum over ranks of narrow[t, part of o] b[slot of t, o]."""
    at_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    end, first_O = tl.load(starts + part + 1), tl.load(starts + part) + tl.program_id(1) * OUTPUTS
    out_O = first_O + tl.arange(0, OUTPUTS)
    inside_O = out_O < end
    of_T = tl.load(of + at_T, mask=at_T < T, other=0)
    for slot in range(SLOTS):
        mine_T = of_T == slot + 1
        if (tl.max(mine_T.to(tl.int32), 0) > 0) & (first_O < end):
            rank, offset = tl.load(ranks + slot), tl.load(offsets + slot)
            total_TO = tl.zeros([TOKENS, OUTPUTS], tl.float32)
            for first in range(0, rank, DEPTH):
                in_R = first + tl.arange(0, DEPTH)
                inside_R = in_R < rank
                narrow_TR = tl.zeros([TOKENS, DEPTH], tl.float32)
                for split in range(SPLITS):
                    at = ((split * T + at_T.to(tl.int64)[:, None]) * PARTS + part) * MOST + in_R[None, :]
                    narrow_TR += tl.load(narrow + at, mask=mine_T[:, None] & inside_R[None, :], other=0.0)
                b_RO = tl.load(
                    b + out_O.to(tl.int64)[None, :] * b_line + offset + in_R[:, None],
                    mask=inside_R[:, None] & inside_O[None, :], other=0.0,
                )  # fmt: skip
                total_TO = tl.dot(narrow_TR.to(b.dtype.element_ty), b_RO, total_TO, input_precision="ieee")
            here = out + at_T.to(tl.int64)[:, None] * out_line + out_O[None, :]
            both = mine_T[:, None] & inside_O[None, :]
            before_TO = tl.load(here, mask=both, other=0.0).to(tl.float32)
            added_TO = before_TO + total_TO * tl.load(scales + slot)
            tl.store(here, added_TO.to(out.dtype.element_ty), mask=both)


def add_lora(out_TO: Tensor, x_TD: Tensor, stack: LoraStack, tokens: TokenAdapters) -> None:
    count, depth = x_TD.shape
    if not count:
        return
    slots, parts, most = len(stack.ranks_S), stack.parts, stack.most_rank
    tile = 16 if count <= 32 else 64
    ranks = 32 if most > 16 else 16
    splits = min(_MOST_SPLITS, cdiv(depth, 256)) if count <= _FEW_TOKENS else 1
    piece = cdiv(cdiv(depth, splits), 64) * 64
    narrow = torch.empty(splits, count, parts, most, dtype=torch.float32, device=x_TD.device)
    _narrow_kernel[(cdiv(count, tile), parts * cdiv(most, ranks), splits)](
        x_TD, stack.a_LD, tokens.of_T, stack.ranks_S, stack.offsets_S, narrow, count, depth, x_TD.stride(0),
        stack.a_LD.stride(0), piece, SLOTS=slots, PARTS=parts, MOST=most, TOKENS=tile, RANKS=ranks, DEPTH=64,
    )  # fmt: skip
    outputs = 64 if stack.widest > 32 else 32
    _wide_kernel[(cdiv(count, tile), cdiv(stack.widest, outputs), parts)](
        out_TO, narrow, stack.b_OL, tokens.of_T, stack.ranks_S, stack.offsets_S, stack.scales_S, stack.starts_P1, count,
        out_TO.stride(0), stack.b_OL.stride(0), SPLITS=splits, SLOTS=slots, PARTS=parts, MOST=most, TOKENS=tile,
        OUTPUTS=outputs, DEPTH=32,
    )  # fmt: skip
