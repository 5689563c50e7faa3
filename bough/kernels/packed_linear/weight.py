"""A weight in few bits, and the formats there are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bough.kernels.packed_linear.codes import Inputs


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint stores a kind: `block` columns in `block_bytes` bytes."""

    block: int
    block_bytes: int


FORMATS = {
    "Q4_0": Format(32, 18),
    "Q4_1": Format(32, 20),
    "Q5_0": Format(32, 22),
    "Q5_1": Format(32, 24),
    "Q8_0": Format(32, 34),
    "Q4_K": Format(256, 144),
    "Q5_K": Format(256, 176),
    "Q6_K": Format(256, 210),
    "F16": Format(32, 64),
    "BF16": Format(32, 64),
    "F32": Format(32, 128),
}


class Functions(Protocol):
    """The implementation that packed a weight is the one that can read it."""

    def packed_linear(
        self, x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None, *, exact: bool, out: Tensor | None
    ) -> Tensor: ...

    def packed_rows(self, ids_T: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor: ...

    def dequantise(self, weight: PackedWeight) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """[rows, cols] in the kind's bits. Made by `pack` or `pack_codes`; what `data` holds is the implementation's own
    business."""

    kind: str
    """A GGUF kind, or that of `Codes`."""
    rows: int
    cols: int
    """Width of the activations."""
    data: tuple[Tensor, ...]
    functions: Functions = field(repr=False)
    handle: Any = field(default=None, repr=False)
    """What the implementation passes to its library."""
    address: int = 0
    order: Tensor | None = None
    """Activations are taken in this order first, by `in_order`."""
    inputs: Inputs | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.data)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols
