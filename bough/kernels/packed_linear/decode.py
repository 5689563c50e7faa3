# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Codes and scales on a GPU: how they lie in memory, and a step of a product with them.

Codes of 8 bits are [O, D]. Codes of 4 bits are [O, D / 2]: of 64 columns, byte j holds column j in its low half and column
j + 32 in its high half, so that both halves are tiles of neighbouring columns. Scales and zero points have groups first,
[G, ceil(O / rows)].
Weights are multiplied as the checkpoint means them: a code less its zero point is exact in bfloat16, and scales multiply
float32 sums; e2m1 times e4m3, of groups of 16, is exact in bfloat16 too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.choices import facts_of
from bough.kernels.packed_linear.codes import CODE_BITS, TABLES, CodeKind, Codes

HALF: Final = tl.constexpr(32)
"""Columns of a half."""
_WIDEST: Final = 128
"""Columns of a step, at most."""
_LEAST: Final = 32
"""Columns of a step, at least: what tensor cores take twice over."""
_KINDS: Final[dict[CodeKind, int]] = {"float8": 0, "int8": 1, "int4": 2, "float4": 3, "nf4": 4, "bnb_fp4": 4}

FLOAT8 = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
FLOAT4 = tl.constexpr(3)
TABLE4 = tl.constexpr(4)


_TWICE = """{{
.reg .b32 h, m, f, c;
mov.b32 f, {factor};
{addend}
prmt.b32 h, $2, 0, {first};
{bits}
fma.rn.bf16x2 $0, h, f, {c0};
prmt.b32 h, $2, 0, {second};
{bits}
fma.rn.bf16x2 $1, h, f, {c1};
}}"""
"""Four codes of 8 bits, or halves of bytes, become four bfloat16: two are spread into the halves of `h`, their bits are put
where those of a bfloat16 belong, and a product mends the exponent's bias (or a sum takes away what was added)."""
_MINUS_ZERO = "mov.b32 c, 0x80008000;"
FLOAT8_PAIRS = tl.constexpr(
    _TWICE.format(
        factor="0x7b807b80",  # 2^120
        addend=_MINUS_ZERO,
        first="0x1404",
        second="0x3424",
        bits="shr.b32 m, h, 4;\nand.b32 m, m, 0x07f007f0;\nlop3.b32 h, h, 0x80008000, m, 0xEA;",
        c0="c",
        c1="c",
    )
)


def _halves(*, high: bool, integers: bool) -> tl.constexpr:
    bits = "shr.b32 h, h, 4;\n" if high else ""
    if integers:  # 128 + code, since code is below the exponent of 128; less (128 + zero point)
        bits += "lop3.b32 h, h, 0x000f000f, 0x43004300, 0xEA;"
    else:
        bits += "shl.b32 m, h, 6;\nand.b32 m, m, 0x01c001c0;\nshl.b32 h, h, 12;\nlop3.b32 h, h, 0x80008000, m, 0xEA;"
    return tl.constexpr(
        _TWICE.format(
            factor="0x3f803f80" if integers else "0x7e807e80",  # 1, or 2^126
            addend="" if integers else _MINUS_ZERO,
            first="0x4140",
            second="0x4342",
            bits=bits,
            c0="$3" if integers else "c",
            c1="$4" if integers else "c",
        )
    )


LOW_INT4 = _halves(high=False, integers=True)
HIGH_INT4 = _halves(high=True, integers=True)
LOW_FLOAT4 = _halves(high=False, integers=False)
HIGH_FLOAT4 = _halves(high=True, integers=False)


@dataclass(frozen=True, slots=True)
class DeviceCodes:
    """A weight for the kernels of this package. What stands in padded columns is finite, and meets activations of zero."""

    codes: Tensor
    """uint8, [O, D] or [O, D / 2]."""
    scales: Tensor
    """[G, ceil(O / scale_rows)]; [1, O] if a row has one."""
    zeros: Tensor | None
    """uint8, shaped as the scales."""
    row_scales: Tensor | None
    """float32 [O]"""
    table: Tensor | None
    """float32 [16]"""
    kind: CodeKind
    cols: int
    """D, with padding."""
    group: int
    """Columns that share a scale; 0: all."""
    scale_rows: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        held = (self.codes, self.scales, self.zeros, self.row_scales, self.table)
        return tuple(tensor for tensor in held if tensor is not None)

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def by_row(self) -> list[Tensor]:
        """Tensors whose first dimension runs along the weight's rows..."""
        return [each for each in (self.codes, self.row_scales) if each is not None]

    @property
    def by_column(self) -> list[Tensor]:
        """...and those whose second does."""
        return [each for each in (self.scales, self.zeros) if each is not None]

    @property
    def step(self) -> int:
        """Columns that a product takes at a time."""
        four = CODE_BITS[self.kind] == 4
        if self.group == 0:
            return _WIDEST if self.cols % _WIDEST == 0 else 64 if four else _LEAST
        if four:
            return max(64, min(self.group, _WIDEST))
        return min(self.group, _WIDEST)

    def arguments(self) -> tuple[Tensor, ...]:
        """For kernels: codes, scales, zero points, scales of rows, table. Tensors that are not there are stood in for."""
        return (
            self.codes,
            self.scales,
            self.codes if self.zeros is None else self.zeros,
            self.scales if self.row_scales is None else self.row_scales,
            self.scales if self.table is None else self.table,
        )

    def constants(self) -> dict[str, object]:
        """For kernels that call `add_product`."""
        facts = facts_of(self.codes.device.type, self.codes.device.index)
        return {
            "KIND": _KINDS[self.kind],
            "ZERO": self.zeros is not None,
            "ROW_SCALE": self.row_scales is not None,
            "GROUP": self.group,
            "SCALE_ROWS": self.scale_rows,
            "NATIVE": facts.capability >= (8, 9),
            "PTX": facts.capability >= (8, 0) and torch.version.hip is None,
            "BLOCK_K": self.step,
        }


def lay_out(codes: Codes) -> DeviceCodes | None:
    """The weight as kernels want it, in memory of its own; None if its groups are none that they take."""
    codes = codes.sorted()
    rows, cols = codes.shape
    group = 0 if codes.group >= cols else codes.group
    if group == 0:
        codes = codes.by_row()
    else:
        common = math.gcd(group, _WIDEST)
        if common < (16 if codes.kind == "float4" else _LEAST):
            return None
        codes, group = codes.grouped(common), common
    four = CODE_BITS[codes.kind] == 4
    unit = max(2 * HALF.value if four else _LEAST, group)
    pad = -cols % unit
    values = F.pad(codes.values_OD.view(torch.uint8), (0, pad))
    if four:
        halves = values.view(rows, -1, 2, HALF.value)
        values = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    more = 0 if group == 0 else (cols + pad) // group - codes.scale_OG.shape[1]
    row_scales = codes.row_scale_O
    return DeviceCodes(
        values.contiguous(),
        _turned(codes.scale_OG, more),
        None if codes.zero_OG is None else _turned(codes.zero_OG, more),
        None if row_scales is None else row_scales.float().contiguous(),
        torch.tensor(TABLES[codes.kind], device=values.device) if _KINDS[codes.kind] == TABLE4.value else None,
        codes.kind,
        cols + pad,
        group,
        codes.rows,
    )


def stack_laid_out(parts: Sequence[DeviceCodes]) -> DeviceCodes | None:
    """Weights of one kind and width on top of one another; None if they differ, or have scales of several rows."""
    first = parts[0]

    def how(part: DeviceCodes) -> tuple[object, ...]:
        lone = (part.zeros is None, part.row_scales is None)
        return (part.kind, part.cols, part.group, part.scale_rows, part.scales.dtype, *lone)

    if first.scale_rows != 1 or any(how(part) != how(first) for part in parts):
        return None
    zeros = [part.zeros for part in parts if part.zeros is not None]
    row_scales = [part.row_scales for part in parts if part.row_scales is not None]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts], 1),
        zeros=torch.cat(zeros, 1) if zeros else None,
        row_scales=torch.cat(row_scales) if row_scales else None,
    )


def _turned(scales: Tensor, more: int) -> Tensor:
    return F.pad(scales, (0, more)).T.contiguous()


@triton.jit
def _as_weight(code, DTYPE: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, table):
    """What codes are worth before zero points and scales."""
    if KIND == FLOAT8:
        if NATIVE and (DTYPE == tl.bfloat16):  # noqa: SIM300
            value = tl.inline_asm_elementwise(FLOAT8_PAIRS, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
        elif NATIVE:
            value = code.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        else:
            bits = ((code & 0x7F).to(tl.int32) << 20) | ((code & 0x80).to(tl.int32) << 24)
            value = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120: the exponents' biases
    elif KIND == FLOAT4:
        bits = ((code & 7).to(tl.int32) << 22) | ((code & 8).to(tl.int32) << 28)
        value = (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126
    elif KIND == TABLE4:
        value = tl.load(table + code.to(tl.int32)).to(DTYPE)
    else:
        value = code.to(DTYPE)
    return value


@triton.jit
def _weight(code, zero, DTYPE: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, table):
    """[N, K] of type DTYPE, exact but for those of tables. `zero` is [N, 1]."""
    if (KIND > INT4) or (KIND == FLOAT8):
        value = _as_weight(code, DTYPE, KIND, NATIVE, table)
    elif (KIND == INT4) and (DTYPE == tl.bfloat16):  # noqa: SIM300
        # A code below the exponent of 128 makes 128 + code, without a conversion.
        value = (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128.0).to(tl.bfloat16)
    else:
        value = (code.to(tl.float32) - zero).to(DTYPE)
    return value


@triton.jit
def _half_weight(
    packed,
    zero,
    HIGH: tl.constexpr,
    DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    table,
):
    """`_weight` of the high or the low halves of bytes."""
    if PTX and (KIND == INT4) and (DTYPE == tl.bfloat16):  # noqa: SIM300
        minus = (zero * 0.0 - zero - 128.0).to(tl.bfloat16) + tl.zeros(packed.shape, tl.bfloat16)
        value = tl.inline_asm_elementwise(
            HIGH_INT4 if HIGH else LOW_INT4, "=r,=r,r,r,r", [packed, minus], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif PTX and (KIND == FLOAT4) and (DTYPE == tl.bfloat16):  # noqa: SIM300
        value = tl.inline_asm_elementwise(
            HIGH_FLOAT4 if HIGH else LOW_FLOAT4, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        value = _weight((packed >> 4) if HIGH else (packed & 15), zero, DTYPE, KIND, NATIVE, table)
    return value


@triton.jit
def _inputs(x, source, real, col, depth, stride):
    """[K, T] of the activations."""
    at = x + source[None, :] * stride + col[:, None]
    return tl.load(at, mask=real[None, :] & (col < depth)[:, None], other=0.0)


@triton.jit
def _scale_at(scales, group, width, row, inside, SCALE_ROWS: tl.constexpr):
    """float32 [N]: the scales of a group."""
    at = scales + tl.cast(group, tl.int64) * width + row // SCALE_ROWS
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _zero_at(zeros, group, width, row, inside, ZERO: tl.constexpr, KIND: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """float32 [N, 1]: zero points of a group."""
    if ZERO:
        at = zeros + tl.cast(group, tl.int64) * width + row // SCALE_ROWS
        zero = tl.load(at, mask=inside, other=0).to(tl.float32)
    else:
        zero = (row * 0).to(tl.float32) + (8.0 if KIND == INT4 else 128.0)
    return zero[:, None]


@triton.jit
def add_product(
    acc,
    x,
    source,
    real,
    depth,
    x_stride,
    codes,
    scales,
    zeros,
    table,
    width,
    row,
    inside,
    k,
    cols,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc [N, T] + weight[row, k : k + BLOCK_K] @ x[source, k : k + BLOCK_K].T, scaled unless GROUP is 0.

    `row` are int64, `width` is how many scales a group has, `cols` the padded columns, `depth` those of x.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    if KIND >= INT4:
        byte = tl.arange(0, BLOCK_K // 2)
        at = codes + row[:, None] * (cols // 2) + (k // 2 + byte)[None, :]
        packed = tl.load(at, mask=inside[:, None], other=0, eviction_policy="evict_first")
        low_col = k + byte // HALF * (2 * HALF) + byte % HALF
        x_low = _inputs(x, source, real, low_col, depth, x_stride)
        x_high = _inputs(x, source, real, low_col + HALF, depth, x_stride)
        if GROUP == 16:
            scale_at = scales + (row // SCALE_ROWS)[:, None]
            low_at = scale_at + (low_col // GROUP).to(tl.int64)[None, :] * width
            high_at = scale_at + ((low_col + HALF) // GROUP).to(tl.int64)[None, :] * width
            low_scale = tl.load(low_at, mask=inside[:, None], other=0.0).to(DTYPE)
            high_scale = tl.load(high_at, mask=inside[:, None], other=0.0).to(DTYPE)
            zero = (row * 0).to(tl.float32)[:, None]
            acc = tl.dot(
                _half_weight(packed, zero, False, DTYPE, KIND, NATIVE, PTX, table) * low_scale,
                x_low,
                acc,
                input_precision=PRECISION,
            )
            acc = tl.dot(
                _half_weight(packed, zero, True, DTYPE, KIND, NATIVE, PTX, table) * high_scale,
                x_high,
                acc,
                input_precision=PRECISION,
            )
        else:
            group = 0 if GROUP == 0 else k // GROUP
            zero = _zero_at(zeros, group, width, row, inside, ZERO, KIND, SCALE_ROWS)
            w_low = _half_weight(packed, zero, False, DTYPE, KIND, NATIVE, PTX, table).to(DTYPE)
            if GROUP == 32:
                high_zero = _zero_at(zeros, group + 1, width, row, inside, ZERO, KIND, SCALE_ROWS)
                w_high = _half_weight(packed, high_zero, True, DTYPE, KIND, NATIVE, PTX, table).to(DTYPE)
                part = tl.dot(w_low, x_low, input_precision=PRECISION)
                acc += part * _scale_at(scales, group, width, row, inside, SCALE_ROWS)[:, None]
                part = tl.dot(w_high, x_high, input_precision=PRECISION)
                acc += part * _scale_at(scales, group + 1, width, row, inside, SCALE_ROWS)[:, None]
            else:
                w_high = _half_weight(packed, zero, True, DTYPE, KIND, NATIVE, PTX, table).to(DTYPE)
                if GROUP == 0:
                    acc = tl.dot(w_low, x_low, acc, input_precision=PRECISION)
                    acc = tl.dot(w_high, x_high, acc, input_precision=PRECISION)
                else:
                    part = tl.dot(w_low, x_low, input_precision=PRECISION)
                    part = tl.dot(w_high, x_high, part, input_precision=PRECISION)
                    acc += part * _scale_at(scales, group, width, row, inside, SCALE_ROWS)[:, None]
    else:
        col = k + tl.arange(0, BLOCK_K)
        at = codes + row[:, None] * cols + col[None, :]
        code = tl.load(at, mask=inside[:, None], other=0, eviction_policy="evict_first")
        x_tile = _inputs(x, source, real, col, depth, x_stride)
        group = 0 if GROUP == 0 else k // GROUP
        zero = _zero_at(zeros, group, width, row, inside, ZERO, KIND, SCALE_ROWS)
        w = _weight(code, zero, DTYPE, KIND, NATIVE, table)
        if GROUP == 0:
            acc = tl.dot(w, x_tile, acc, input_precision=PRECISION)
        else:
            part = tl.dot(w, x_tile, input_precision=PRECISION)
            acc += part * _scale_at(scales, group, width, row, inside, SCALE_ROWS)[:, None]
    return acc


@triton.jit
def last_scale(
    acc, scales, row_scales, row, inside, GROUP: tl.constexpr, ROW_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr
):
    """`acc` times the scales that all of a row's columns share."""
    if GROUP == 0:
        acc = acc * _scale_at(scales, 0, 0, row, inside, SCALE_ROWS)[:, None]
    if ROW_SCALE:
        acc = acc * tl.load(row_scales + row, mask=inside, other=0.0)[:, None]
    return acc


@triton.jit
def _dequantise_kernel(
    codes,
    scales,
    zeros,
    row_scales,
    table,
    rows_at,
    out,
    count,
    cols,
    depth,
    width,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = row `rows_at[i]` of the weight, or row i unless CHOSEN."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < count
    row = place
    if CHOSEN:
        row = tl.load(rows_at + place, mask=inside, other=0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = inside[:, None] & (col < depth)[None, :]
    if KIND >= INT4:
        byte = col // (2 * HALF) * HALF + col % HALF
        code = tl.load(codes + row[:, None] * (cols // 2) + byte[None, :], mask=both, other=0)
        is_high = (col // HALF % 2)[None, :] == 1
        code = tl.where(is_high, code >> 4, code & 15)
    else:
        code = tl.load(codes + row[:, None] * cols + col[None, :], mask=both, other=0)
    group = col * 0
    if GROUP != 0:
        group = col // GROUP
    at = group.to(tl.int64)[None, :] * width + (row // SCALE_ROWS)[:, None]
    scale = tl.load(scales + at, mask=both, other=0.0).to(tl.float32)
    value = _as_weight(code, tl.float32, KIND, NATIVE, table)
    if (KIND > FLOAT8) and (KIND < FLOAT4):  # integers
        if ZERO:
            value -= tl.load(zeros + at, mask=both, other=0).to(tl.float32)
        else:
            value -= 8.0 if KIND == INT4 else 128.0
    value *= scale
    if ROW_SCALE:
        value *= tl.load(row_scales + row, mask=inside, other=0.0)[:, None]
    tl.store(out + place[:, None] * depth + col[None, :], value.to(out.dtype.element_ty), mask=both)


def dequantise_rows(weight: DeviceCodes, depth: int, out: Tensor, rows_at: Tensor | None = None) -> None:
    """Fills out [N, depth] with the weight's rows, or with those of `rows_at`."""
    count = out.shape[0]
    if count == 0:
        return
    block_n, block = (1, 512) if rows_at is not None else (16, 256)
    grid = (triton.cdiv(count, block_n), triton.cdiv(depth, block))
    _dequantise_kernel[grid](
        *weight.arguments(),
        weight.codes if rows_at is None else rows_at,
        out,
        count,
        weight.cols,
        depth,
        weight.scales.shape[1],
        **weight.constants(),
        CHOSEN=rows_at is not None,
        BLOCK_N=block_n,
        BLOCK=block,
        num_warps=4,
    )
