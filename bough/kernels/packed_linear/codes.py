"""A quantised weight as its checkpoint means it: one code per weight, scales, zero points. Nothing is packed yet.

Readers of checkpoint formats make `Codes`, packers of kernels take them, so that neither knows the other.
O rows, D columns, G scales of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

CodeKind = Literal["float8", "int8", "int4", "float4", "nf4", "bnb_fp4"]
"""float8: e4m3. int8, int4: unsigned codes, from which a zero point is subtracted. float4: e2m1. nf4, bnb_fp4: the tables of
bitsandbytes."""

CODE_BITS: Final[dict[CodeKind, int]] = {
    "float8": 8, "int8": 8, "int4": 4, "float4": 4, "nf4": 4, "bnb_fp4": 4,
}  # fmt: skip

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES: Final[dict[CodeKind, tuple[float, ...]]] = {
    "float4": (*E2M1, *(-value for value in E2M1)),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "bnb_fp4": (
        0.0, 0.005208333488553762, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        0.0, -0.005208333488553762, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
}  # fmt: skip
"""What the codes of four bits are worth, where they are no integers."""

PADDED: Final = 32
"""Columns of a group once uneven ones are padded: what every kernel takes."""

InputKind = Literal["float8", "int8"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """How the checkpoint wants activations rounded before a product. A kernel may round less, never more."""

    kind: InputKind
    group: int | None = None
    """Columns that share a scale; None: a token's all."""
    scale: float | None = None
    """Of all tokens, where it was calibrated; None: from each token's largest value."""
    power_of_two: bool = False
    """Scales are rounded up to a power of two."""


@dataclass(frozen=True, slots=True)
class Codes:
    """[O, D] weights: (values - zero) * scale for integers, table[values] * scale otherwise, times the row's scale."""

    kind: CodeKind
    values_OD: Tensor
    """uint8, or float8_e4m3fn."""
    scale_OG: Tensor
    """float32, float16 or bfloat16; [ceil(O / rows), ceil(D / group)]."""
    group: int
    """Columns that share a scale."""
    rows: int = 1
    """Rows that share a scale."""
    zero_OG: Tensor | None = None
    """uint8 zero points, shaped as the scales; None: half of the range (8 or 128)."""
    row_scale_O: Tensor | None = None
    """float32, multiplies a row (a second level of scales)."""
    group_of_D: Tensor | None = None
    """int64: column j has scale `group_of_D[j]` of its row, where columns of a group are not neighbours (`group` is then the
    number of columns in a full group)."""
    order_D: Tensor | None = None
    """int64: column j multiplies activation `order_D[j]` (-1: none). None: column j multiplies activation j."""
    inputs: Inputs | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.values_OD.shape
        return rows, cols

    @property
    def num_inputs(self) -> int:
        """Width of the activations. Columns in another order are as many, unless groups were padded."""
        return self.shape[1] if self.order_D is None else int((self.order_D >= 0).sum())

    def cut(self, rows: slice, cols: slice) -> Codes:
        """The given rows and columns. Scales are repeated where a cut is not on their boundary. Columns in another order can
        only be cut before they are ordered."""
        (num_rows, num_cols) = self.shape
        top, bottom, _ = rows.indices(num_rows)
        left, right, _ = cols.indices(num_cols)
        if (top, bottom, left, right) == (0, num_rows, 0, num_cols):
            return self
        if self.order_D is not None and (left, right) != (0, num_cols):
            raise ValueError("columns are cut before they are ordered")
        group, down = _step(self.group, left, right, num_cols), _step(self.rows, top, bottom, num_rows)
        if self.group_of_D is not None:
            group = self.group

        def some(scales: Tensor) -> Tensor:
            finer = scales.repeat_interleave(self.rows // down, 0)[top // down : -(-bottom // down)]
            if self.group_of_D is not None:
                return finer
            return finer.repeat_interleave(self.group // group, 1)[:, left // group : -(-right // group)]

        return replace(
            self,
            values_OD=self.values_OD[top:bottom, left:right],
            scale_OG=some(self.scale_OG),
            zero_OG=None if self.zero_OG is None else some(self.zero_OG),
            row_scale_O=None if self.row_scale_O is None else self.row_scale_O[top:bottom],
            group_of_D=None if self.group_of_D is None else self.group_of_D[left:right],
            group=group,
            rows=down,
        )

    def sorted(self) -> Codes:
        """The same with the columns of a group side by side, in `order_D` if that is another order than now.

        A group with fewer columns than others (a rank holds some columns of every group) is padded, in groups of `PADDED`.
        """
        if self.group_of_D is None:
            return self
        of_D, num_cols = self.group_of_D, self.shape[1]
        regular = torch.arange(num_cols, device=of_D.device) // self.group
        if torch.equal(of_D, regular):
            return replace(self, group_of_D=None)
        order = torch.argsort(of_D, stable=True)
        counts = torch.bincount(of_D, minlength=self.scale_OG.shape[1])
        if bool((counts == self.group).all()):
            values = _columns(self.values_OD, order)
            return replace(self, values_OD=values, group_of_D=None, order_D=order)
        blocks = -(-counts // PADDED)
        starts = torch.cumsum(blocks * PADDED, 0) - blocks * PADDED
        before = torch.cumsum(counts, 0) - counts
        place = starts[of_D[order]] + torch.arange(num_cols, device=of_D.device) - before[of_D[order]]
        padded = order.new_full((int(blocks.sum()) * PADDED,), -1)
        padded[place] = order
        of_block = torch.repeat_interleave(torch.arange(len(counts), device=of_D.device), blocks)
        return replace(
            self,
            values_OD=_columns(self.values_OD, padded.clamp(min=0)),
            scale_OG=self.scale_OG[:, of_block],
            zero_OG=None if self.zero_OG is None else self.zero_OG[:, of_block],
            group=PADDED,
            group_of_D=None,
            order_D=padded,
        )

    def by_row(self) -> Codes:
        """The same with scales of single rows."""
        if self.rows == 1:
            return self
        num_rows = self.shape[0]
        zero = self.zero_OG
        return replace(
            self,
            scale_OG=self.scale_OG.repeat_interleave(self.rows, 0)[:num_rows],
            zero_OG=None if zero is None else zero.repeat_interleave(self.rows, 0)[:num_rows],
            rows=1,
        )

    def grouped(self, group: int) -> Codes:
        """The same with scales of fewer columns; `group` divides the present one."""
        if group == self.group:
            return self
        times, count = self.group // group, -(-self.shape[1] // group)
        zero = self.zero_OG
        return replace(
            self,
            scale_OG=self.scale_OG.repeat_interleave(times, 1)[:, :count],
            zero_OG=None if zero is None else zero.repeat_interleave(times, 1)[:, :count],
            group=group,
        )


def _columns(values_OD: Tensor, at_D: Tensor) -> Tensor:
    """Columns of a tensor; bytes of floats of 8 bits, which can't be indexed."""
    return values_OD.view(torch.uint8)[:, at_D].view(values_OD.dtype)


def _step(size: int, first: int, last: int, total: int) -> int:
    """The largest divisor of `size` that both ends of a cut are a multiple of; the total's end need not be."""
    return math.gcd(size, first) if last == total else math.gcd(size, first, last)


def stack(parts: list[Codes]) -> Codes:
    """Parts of one kind on top of one another."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    group = (
        math.gcd(*(part.group for part in parts)) if any(part.group != first.group for part in parts) else first.group
    )
    parts = [part.grouped(group) for part in parts]
    heights = [part.shape[0] for part in parts]
    if any(part.rows != first.rows for part in parts) or any(height % first.rows for height in heights[:-1]):
        parts = [part.by_row() for part in parts]
    zeros = [part.zero_OG for part in parts]
    rows = [part.row_scale_O for part in parts]
    dtype = parts[0].scale_OG.dtype
    if any(part.scale_OG.dtype != dtype for part in parts):
        dtype = torch.float32
    return replace(
        parts[0],
        values_OD=torch.cat([part.values_OD for part in parts]),
        scale_OG=torch.cat([part.scale_OG.to(dtype) for part in parts]),
        zero_OG=_stacked(zeros, parts),
        row_scale_O=_stacked_rows(rows, parts),
    )


def _stacked(zeros: list[Tensor | None], parts: list[Codes]) -> Tensor | None:
    if all(zero is None for zero in zeros):
        return None
    return torch.cat([default_zero(part) if zero is None else zero for zero, part in zip(zeros, parts, strict=True)])


def _stacked_rows(rows: list[Tensor | None], parts: list[Codes]) -> Tensor | None:
    if all(row is None for row in rows):
        return None
    ones = [part.scale_OG.new_ones(part.shape[0], dtype=torch.float32) for part in parts]
    return torch.cat([one if row is None else row for row, one in zip(rows, ones, strict=True)])


def default_zero(codes: Codes) -> Tensor:
    """The zero points of symmetric integers, written out."""
    return torch.full_like(codes.scale_OG, 1 << (CODE_BITS[codes.kind] - 1), dtype=torch.uint8)


def can_stack(one: Codes, other: Codes) -> bool:
    """Whether two parts can be one weight: of one kind, for activations in one order that are rounded alike."""
    alike = one.kind == other.kind and one.inputs == other.inputs and one.shape[1] == other.shape[1]
    if one.order_D is None or other.order_D is None:
        return alike and one.order_D is other.order_D
    return alike and torch.equal(one.order_D, other.order_D)


def dequantise_codes(codes: Codes) -> Tensor:
    """float32 [O, D], columns in the order of the codes."""
    codes = codes.by_row()
    scale = _of_columns(codes.scale_OG.float(), codes)
    if codes.kind == "float8":
        values = codes.values_OD.float()
    elif codes.kind in TABLES:
        table = torch.tensor(TABLES[codes.kind], device=codes.values_OD.device)
        values = table[codes.values_OD.int()]
    else:
        zero = default_zero(codes) if codes.zero_OG is None else codes.zero_OG
        values = codes.values_OD.float() - _of_columns(zero.float(), codes)
    out = values * scale
    return out if codes.row_scale_O is None else out * codes.row_scale_O[:, None]


def _of_columns(scales_OG: Tensor, codes: Codes) -> Tensor:
    """[O, D]: the scale of every weight."""
    if codes.group_of_D is not None:
        return scales_OG[:, codes.group_of_D]
    return scales_OG.repeat_interleave(codes.group, 1)[:, : codes.shape[1]]


def activation_order(codes: Codes) -> Tensor | None:
    """`order_D` for `in_order`: the column after the last activation stands for those without one."""
    if codes.order_D is None:
        return None
    return torch.where(codes.order_D < 0, codes.num_inputs, codes.order_D)


def in_order(x_TD: Tensor, order: Tensor) -> Tensor:
    """Activations as the columns of a weight want them, by `activation_order`; those that are not there are zero."""
    if order.shape[0] > x_TD.shape[-1]:
        x_TD = torch.nn.functional.pad(x_TD, (0, 1))
    return x_TD.index_select(-1, order)


def out_of_order(dense_OD: Tensor, order: Tensor, num_inputs: int) -> Tensor:
    """A weight's columns back in the order of the activations."""
    real = order < num_inputs
    out = dense_OD.new_empty(*dense_OD.shape[:-1], num_inputs)
    out[..., order[real]] = dense_OD[..., real]
    return out
