# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""GGUF's blocks on a GPU, kept in their own bits: how they lie in memory, products with few tokens, and rows as floats.

Codes are split into planes: four bits as in `decode.py` (of 64 columns, byte j holds column j in its low half and column
j + 32 in its high half), and the fifth, or the fifth and sixth bits of the same two columns, side by side in bytes of their
own. Scales and minima have groups first, [G, O]. That takes what the file has of a weight, plus at most 3 %.

Q4_0 and Q8_0 are integers with a scale per group, which `decode.py` serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import cdiv, num_sms, pdl_options, power_of_two, trigger, wait
from bough.kernels.linear.skinny import SCRATCH, sum_partials
from bough.kernels.packed_linear.gguf_parts import GgufParts

KINDS: Final = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""What is kept so."""
HALF: Final = tl.constexpr(32)
STEP: Final = tl.constexpr(64)
"""Columns that a product takes at a time."""


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """A weight for the kernels of this file."""

    low: Tensor
    """uint8 [O, D / 2]"""
    high: Tensor | None
    """uint8 [O, D / 8] or [O, D / 4]"""
    scales: Tensor
    """[G, O]"""
    minima: Tensor | None
    blocks: Tensor | None
    """float16 [D / 256, O]: multiplies scales..."""
    minima_of_blocks: Tensor | None
    """...and minima, with a minus."""
    cols: int
    """D, padded to a multiple of `STEP`."""
    group: int
    offset: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.by_row, *self.by_column)

    @property
    def num_rows(self) -> int:
        return self.low.shape[0]

    @property
    def by_row(self) -> list[Tensor]:
        """Tensors whose first dimension runs along the weight's rows..."""
        return [each for each in (self.low, self.high) if each is not None]

    @property
    def by_column(self) -> list[Tensor]:
        """...and those whose second does."""
        held = (self.scales, self.minima, self.blocks, self.minima_of_blocks)
        return [each for each in held if each is not None]

    def arguments(self) -> tuple[Tensor, ...]:
        """For kernels; what is not there is stood in for."""
        return (
            self.low,
            self.low if self.high is None else self.high,
            self.scales,
            self.scales if self.minima is None else self.minima,
            self.scales if self.blocks is None else self.blocks,
            self.scales if self.minima_of_blocks is None else self.minima_of_blocks,
        )

    def constants(self) -> dict[str, object]:
        bits = 0 if self.high is None else self.high.shape[1] * 8 // self.cols
        return {
            "BITS": bits,
            "GROUP": self.group,
            "OFFSET": self.offset,
            "MINIMA": self.minima is not None,
            "TWO_LEVELS": self.blocks is not None,
        }


def lay_out_blocks(parts: GgufParts) -> DeviceBlocks:
    """The weight as kernels want it, in memory of its own."""
    rows, cols = parts.codes_OD.shape
    pad = -cols % STEP.value
    halves = F.pad(parts.codes_OD, (0, pad)).view(rows, -1, 2, HALF.value)
    first, second = halves[:, :, 0], halves[:, :, 1]
    low = ((first & 15) | (second & 15) << 4).flatten(1).contiguous()
    more = pad // parts.group
    return DeviceBlocks(
        low,
        _high(first >> 4, second >> 4, parts.bits - 4),
        _turned(parts.scale_OG, more),
        None if parts.minimum_OG is None else _turned(parts.minimum_OG, more),
        None if parts.of_blocks_OB is None else _turned(parts.of_blocks_OB, 0),
        None if parts.minimum_of_blocks_OB is None else _turned(parts.minimum_of_blocks_OB, 0),
        cols + pad,
        parts.group,
        parts.offset,
    )


def stack_blocks(parts: Sequence[DeviceBlocks]) -> DeviceBlocks | None:
    """Weights of one kind and width on top of one another; None if they differ."""
    first = parts[0]
    if any(part.constants() != first.constants() or part.cols != first.cols for part in parts):
        return None

    def joined(tensors: list[Tensor | None], dim: int) -> Tensor | None:
        held = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(held, dim) if held else None

    low, scales = joined([part.low for part in parts], 0), joined([part.scales for part in parts], 1)
    assert low is not None, "every weight has codes"
    assert scales is not None, "every weight has scales"
    return replace(
        first,
        low=low,
        high=joined([part.high for part in parts], 0),
        scales=scales,
        minima=joined([part.minima for part in parts], 1),
        blocks=joined([part.blocks for part in parts], 1),
        minima_of_blocks=joined([part.minima_of_blocks for part in parts], 1),
    )


def _high(first: Tensor, second: Tensor, bits: int) -> Tensor | None:
    """The upper bits of columns j and j + 32, side by side, `4 / bits` such pairs in a byte, lowest first."""
    if bits == 0:
        return None
    pairs = (first | second << bits).flatten(1)
    per_byte = 4 // bits
    together = pairs.view(pairs.shape[0], -1, per_byte)
    out = together[..., 0].clone()
    for place in range(1, per_byte):
        out |= together[..., place] << (2 * bits * place)
    return out.contiguous()


def _turned(scales: Tensor, more: int) -> Tensor:
    return F.pad(scales, (0, more)).T.contiguous()


@triton.jit
def _pair_of_codes(low, high, row, inside, byte, k, cols, BITS: tl.constexpr):
    """int32 [N, 32] each: codes of columns k + byte and k + 32 + byte."""
    packed = tl.load(low + row[:, None] * (cols // 2) + (k // 2 + byte)[None, :], mask=inside[:, None], other=0).to(
        tl.int32
    )
    first = packed & 15
    second = packed >> 4
    if BITS > 0:
        PAIRS: tl.constexpr = 4 // BITS
        at = high + row[:, None] * (cols * BITS // 8) + (k * BITS // 8 + byte // PAIRS)[None, :]
        bits = tl.load(at, mask=inside[:, None], other=0).to(tl.int32) >> (byte % PAIRS * (2 * BITS))[None, :]
        first = first | ((bits & ((1 << BITS) - 1)) << 4)
        second = second | (((bits >> BITS) & ((1 << BITS) - 1)) << 4)
    return first, second


@triton.jit
def _scale_of(scales, blocks, group, width, row, inside, GROUP: tl.constexpr, TWO_LEVELS: tl.constexpr):
    """float32, shaped as `group` and `row` together."""
    found = tl.load(scales + group * width + row, mask=inside, other=0).to(tl.float32)
    if TWO_LEVELS:
        block = group // (256 // GROUP)
        found *= tl.load(blocks + block * width + row, mask=inside, other=0).to(tl.float32)
    return found


@triton.jit
def _half_product(
    acc, x_KT, codes, scales, minima, blocks, minima_of_blocks, col, width, row, inside,
    GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMA: tl.constexpr, TWO_LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [N, T] + 32 columns of the weight, the first of which is `col`, times x."""
    DTYPE: tl.constexpr = x_KT.dtype
    group = tl.cast(col // GROUP, tl.int64)
    if (
        GROUP == 16
    ):  # two scales within the columns: weights are scaled before the product, and rounded as dense ones are
        at = group + (tl.arange(0, 32) // 16).to(tl.int64)
        scale = _scale_of(scales, blocks, at[None, :], width, row[:, None], inside[:, None], GROUP, TWO_LEVELS)
        w = ((codes - OFFSET).to(tl.float32) * scale).to(DTYPE)
        acc = tl.dot(w, x_KT, acc, input_precision=PRECISION)
    else:
        scale = _scale_of(scales, blocks, group, width, row, inside, GROUP, TWO_LEVELS)
        w = (codes - OFFSET).to(tl.float32).to(DTYPE)  # exact: six bits at most
        acc += tl.dot(w, x_KT, input_precision=PRECISION) * scale[:, None]
        if MINIMA:
            least = _scale_of(minima, minima_of_blocks, group, width, row, inside, GROUP, TWO_LEVELS)
            if TWO_LEVELS:
                least = -least
            acc += least[:, None] * tl.sum(x_KT.to(tl.float32), 0)[None, :]
    return acc


@triton.jit
def add_blocks(
    acc, x, source, real, depth, x_stride, low, high, scales, minima, blocks, minima_of_blocks, width, row, inside, k, cols,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMA: tl.constexpr, TWO_LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [N, T] + weight[row, k : k + 64] @ x[source, k : k + 64].T. `row` are int64; scales have `width` rows."""
    byte = tl.arange(0, HALF)
    first, second = _pair_of_codes(low, high, row, inside, byte, k, cols, BITS)
    col = k + byte
    x_at = x + source[None, :] * x_stride + col[:, None]
    x_first = tl.load(x_at, mask=real[None, :] & (col < depth)[:, None], other=0.0)
    x_second = tl.load(x_at + HALF, mask=real[None, :] & (col + HALF < depth)[:, None], other=0.0)
    acc = _half_product(
        acc, x_first, first, scales, minima, blocks, minima_of_blocks, k, width, row, inside,
        GROUP, OFFSET, MINIMA, TWO_LEVELS, PRECISION,
    )  # fmt: skip
    return _half_product(
        acc, x_second, second, scales, minima, blocks, minima_of_blocks, k + HALF, width, row, inside,
        GROUP, OFFSET, MINIMA, TWO_LEVELS, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "per_chunk", "total", "k_steps"])
def _blocks_kernel(
    x, low, high, scales, minima, blocks, minima_of_blocks, bias, out, partial, counters,
    T, rows, depth, cols, x_stride, out_stride, per_chunk, total, k_steps,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMA: tl.constexpr, TWO_LEVELS: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `triton._packed_kernel`: chunks of a stream of (tile of rows, step along D); the last of a tile adds its parts."""
    chunk = tl.program_id(0)
    at = chunk * per_chunk
    end = tl.minimum(at + per_chunk, total)
    trigger(PDL)
    wait(PDL)
    token = tl.arange(0, BLOCK_T)
    real = token < T
    while at < end:
        tile = at // k_steps
        k_start = at - tile * k_steps
        k_end = tl.minimum(k_steps, k_start + end - at)
        row = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = row < rows
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for step in tl.range(k_start, k_end):
            acc = add_blocks(
                acc, x, token.to(tl.int64), real, depth, x_stride, low, high, scales, minima, blocks, minima_of_blocks,
                rows, row, inside, step * 64, cols, BITS, GROUP, OFFSET, MINIMA, TWO_LEVELS, PRECISION,
            )  # fmt: skip
        first = tile * k_steps // per_chunk
        last = (tile * k_steps + k_steps - 1) // per_chunk
        finish = first == last
        if first != last:
            place = tl.cast(2 * chunk, tl.int64) + tl.where(chunk == first, 1, 0)
            offset = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + token[None, :]
            tl.store(partial + place * (BLOCK_N * BLOCK_T) + offset, acc)
            tl.debug_barrier()
            done = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            finish = done == last - first
            if finish:
                tl.store(counters + tile, 0)
                acc = sum_partials(partial, first, last, BLOCK_N, BLOCK_T)
        if finish:
            if BIAS:
                acc += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
            out_at = out + token.to(tl.int64)[None, :] * out_stride + row[:, None]
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=real[None, :] & inside[:, None])
        at += k_end - k_start


def multiply_blocks(x_TD: Tensor, weight: DeviceBlocks, bias_O: Tensor | None, out: Tensor) -> Tensor:
    """x @ weight.T (+ bias) into out [T, O], whose rows are contiguous; for few tokens."""
    tokens, depth = x_TD.shape
    if tokens == 0:
        return out
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    device, rows = x.device, weight.low.shape[0]
    block_t, block_n = power_of_two(tokens, 16), 64
    k_steps, tiles = weight.cols // STEP.value, cdiv(rows, block_n)
    total = tiles * k_steps
    per_chunk = cdiv(total, num_sms(device) * 3)
    programs = cdiv(total, per_chunk)
    partial, counters = SCRATCH.get(device, 2 * programs * block_n * block_t, tiles)
    _blocks_kernel[(programs,)](
        x,
        *weight.arguments(),
        weight.scales if bias_O is None else bias_O,
        out,
        partial,
        counters,
        tokens,
        rows,
        depth,
        weight.cols,
        x.stride(0),
        out.stride(0),
        per_chunk,
        total,
        k_steps,
        **weight.constants(),
        BIAS=bias_O is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=4,
        **pdl_options(device),
    )
    return out


@triton.jit
def _rows_kernel(
    low, high, scales, minima, blocks, minima_of_blocks, rows_at, out, count, rows, cols, depth,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMA: tl.constexpr, TWO_LEVELS: tl.constexpr,
    CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[i] = row `rows_at[i]` of the weight, or row i unless CHOSEN; 64 columns of some rows."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < count
    row = place
    if CHOSEN:
        row = tl.load(rows_at + place, mask=inside, other=0).to(tl.int64)
    k = tl.program_id(1) * STEP
    byte = tl.arange(0, HALF)
    first, second = _pair_of_codes(low, high, row, inside, byte, k, cols, BITS)
    for half in tl.static_range(2):
        col = k + half * HALF + byte
        both = inside[:, None] & (col < depth)[None, :]
        group = (col // GROUP).to(tl.int64)[None, :]
        codes = second if half == 1 else first
        scale = _scale_of(scales, blocks, group, rows, row[:, None], both, GROUP, TWO_LEVELS)
        value = (codes - OFFSET).to(tl.float32) * scale
        if MINIMA:
            least = _scale_of(minima, minima_of_blocks, group, rows, row[:, None], both, GROUP, TWO_LEVELS)
            value = value - least if TWO_LEVELS else value + least
        tl.store(out + place[:, None] * depth + col[None, :], value.to(out.dtype.element_ty), mask=both)


def block_rows(weight: DeviceBlocks, depth: int, out: Tensor, rows_at: Tensor | None = None) -> None:
    """Fills out [N, depth] with the weight's rows, or with those of `rows_at`."""
    count = out.shape[0]
    if count == 0:
        return
    block_n = 1 if rows_at is not None else 16
    _rows_kernel[(cdiv(count, block_n), weight.cols // STEP.value)](
        *weight.arguments(),
        weight.low if rows_at is None else rows_at,
        out,
        count,
        weight.low.shape[0],
        weight.cols,
        depth,
        **weight.constants(),
        CHOSEN=rows_at is not None,
        BLOCK_N=block_n,
        num_warps=4,
    )
