"""A tensor in a checkpoint that has not been read yet, and views of it. Reading happens row range by row range.

Everything a mapping does to a tensor (cutting a fused one, taking one expert, undoing a row order) is a view, so that bytes
move once: from the mapped file to where they are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from bough.config.gguf_header import BLOCK_SIZES

ITEM_BYTES: Final = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
}
DENSE_KINDS: Final = frozenset(ITEM_BYTES)
"""Types of single numbers; all others are GGUF's blocks."""
_CHUNK_WEIGHTS: Final = 4 * 1024 * 1024


class Stored(Protocol):
    """A tensor on disk."""

    @property
    def name(self) -> str:
        """As the file calls it."""
        ...

    @property
    def kind(self) -> str:
        """F32, BF16, Q4_1 ..."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the first dimension: in the stored dtype, or float32 if the kind is a block format."""
        ...

    def blocks(self, start: int, stop: int) -> Tensor:
        """The same rows as they lie on disk, uint8 [rows, bytes of a row]. Only for block formats."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """A tensor on disk of whose rows single parts can be read."""

    def read_part(self, start: int, stop: int, *inner: slice) -> Tensor:
        """As `read`; `inner`: what is wanted of the dimensions after the first, in their order."""
        ...


def read_part(stored: Stored, start: int, stop: int, *inner: slice) -> Tensor:
    """Rows `start` to `stop`, and `inner` of the dimensions after the first. What is not wanted is not read, where the
    tensor can be divided."""
    if isinstance(stored, Divisible):
        return stored.read_part(start, stop, *inner)
    return stored.read(start, stop)[(slice(None), *inner)]


def is_packed(stored: Stored) -> bool:
    """Whether the tensor is in a block format (a few bits a weight, with scales)."""
    return stored.kind not in DENSE_KINDS


def stored_bytes(stored: Stored) -> int:
    """How much of the file it takes."""
    weights = math.prod(stored.shape)
    if not is_packed(stored):
        return weights * ITEM_BYTES[stored.kind]
    per_block, block_bytes = BLOCK_SIZES.get(stored.kind, (1, 1))
    return weights // per_block * block_bytes


def read_all(stored: Stored) -> Tensor:
    """The whole tensor; also one without dimensions."""
    return stored.read(0, stored.shape[0] if stored.shape else 1)


def copy_into(target: Tensor, stored: Stored, rows: slice | None = None, cols: slice | None = None) -> None:
    """Copies the given rows and columns into the first rows of `target`, whatever its dtype and device.

    Block formats pass through float32 a chunk at a time, so that a large table never exists in full.
    """
    start, stop, _ = (rows or slice(None)).indices(stored.shape[0])
    weights_a_row = 1
    for dim in stored.shape[1:]:
        weights_a_row *= dim
    step = max(1, _CHUNK_WEIGHTS // weights_a_row) if is_packed(stored) else max(1, stop - start)
    for at in range(start, stop, step):
        end = min(at + step, stop)
        if cols is None or len(stored.shape) < 2:
            part = stored.read(at, end)
        else:
            part = read_part(stored, at, end, *[slice(None)] * (len(stored.shape) - 2), cols)
        target[at - start : end - start].copy_(part)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Some rows of a tensor: one part of a fused one."""

    base: Stored
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.base.shape[1:])

    def read(self, start: int, stop: int) -> Tensor:
        return self.base.read(self.start + start, self.start + stop)

    def read_part(self, start: int, stop: int, *inner: slice) -> Tensor:
        return read_part(self.base, self.start + start, self.start + stop, *inner)

    def blocks(self, start: int, stop: int) -> Tensor:
        return self.base.blocks(self.start + start, self.start + stop)


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """Some columns of a tensor: one part of a fused one that is stored inputs first."""

    base: Stored
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.base.shape[0], self.stop - self.start, *self.base.shape[2:])

    def read(self, start: int, stop: int) -> Tensor:
        return read_part(self.base, start, stop, slice(self.start, self.stop))

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: blocks are not cut along columns")


@dataclass(frozen=True, slots=True)
class Item:
    """One of the matrices stacked in a three-dimensional tensor: one expert."""

    base: Stored
    index: int

    @property
    def name(self) -> str:
        return f"{self.base.name}[{self.index}]"

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape[1:]

    def read(self, start: int, stop: int) -> Tensor:
        return read_part(self.base, self.index, self.index + 1, slice(start, stop))[0]

    def read_part(self, start: int, stop: int, *inner: slice) -> Tensor:
        return read_part(self.base, self.index, self.index + 1, slice(start, stop), *inner)[0]

    def blocks(self, start: int, stop: int) -> Tensor:
        return self.base.blocks(self.index, self.index + 1).view(self.shape[0], -1)[start:stop]


@dataclass(frozen=True, slots=True)
class Reordered:
    """A tensor whose row i is row `order[i]` of the stored one."""

    base: Stored
    order: Tensor

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def read(self, start: int, stop: int) -> Tensor:
        return self.base.read(0, self.shape[0])[self.order[start:stop]]

    def blocks(self, start: int, stop: int) -> Tensor:
        return self.base.blocks(0, self.shape[0])[self.order[start:stop]]


@dataclass(frozen=True, slots=True)
class Shifted:
    """A tensor with a constant added (norm weights that are stored with their 1 already added)."""

    base: Stored
    by: float

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def read(self, start: int, stop: int) -> Tensor:
        return self.base.read(start, stop).to(torch.float32) + self.by

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: a shifted tensor has no blocks")


@dataclass(frozen=True, slots=True)
class AsRow:
    """A vector taken as a matrix of one row."""

    base: Stored

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.base.shape)

    def read(self, start: int, stop: int) -> Tensor:
        return self.base.read(0, self.base.shape[0])[None][start:stop]

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: a vector has no blocks")


@dataclass(frozen=True, slots=True)
class Turned:
    """A matrix that is stored inputs first, outputs first."""

    base: Stored

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.base.shape[1], self.base.shape[0])

    def read(self, start: int, stop: int) -> Tensor:
        return read_part(self.base, 0, self.base.shape[0], slice(start, stop)).T

    def read_part(self, start: int, stop: int, *inner: slice) -> Tensor:
        (rows,) = inner
        first, last, _ = rows.indices(self.base.shape[0])
        return read_part(self.base, first, last, slice(start, stop)).T

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: blocks are not turned")


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Some rows of every group of rows: `count` from `first` on, of each `group`."""

    base: Stored
    group: int
    first: int
    count: int

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.base.shape[0] // self.group * self.count, *self.base.shape[1:])

    def read(self, start: int, stop: int) -> Tensor:
        rows = torch.arange(start, stop)
        at = rows // self.count * self.group + self.first + rows % self.count
        if not len(at):
            return self.base.read(0, 0)
        low, high = int(at[0]), int(at[-1]) + 1
        return self.base.read(low, high)[at - low]

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: blocks are not regrouped")


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor of several dimensions as a matrix: all but the first are one."""

    base: Stored

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.base.shape[0], math.prod(self.base.shape[1:]))

    def read(self, start: int, stop: int) -> Tensor:
        return self.base.read(start, stop).flatten(1)

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: these blocks are not GGUF's")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Numbers of four bits (a sign, two bits of exponent, one of mantissa), two a byte with the lower one first, and a power
    of two for every 32 of them: [..., groups, 16] bytes and [..., groups] exponents plus 127."""

    base: Stored
    scales: Stored

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        *before, groups, size = self.base.shape
        return (*before, groups * size * 2)

    def read(self, start: int, stop: int) -> Tensor:
        blocks, scales = self.base.read(start, stop), self.scales.read(start, stop)
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        table = torch.cat((values, -values)).to(torch.bfloat16)
        pairs = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), -1).flatten(-2)
        powers = torch.exp2(scales.float() - 127).unsqueeze(-1)
        return (pairs * powers.to(torch.bfloat16)).flatten(-2)

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: these blocks are not GGUF's")
