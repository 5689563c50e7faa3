"""GGUF blocks kept packed: a few bits a weight in memory, unpacked inside the multiplication.

Parts of a fused layer may come in different block formats (Q4_K_M files mix them); neighbours of one format are packed
together, others stay matrices of their own that write side by side. What has no packed kernel is dequantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from bough.config.gguf_header import BLOCK_SIZES
from bough.kernels.packed_linear import pack, supported
from bough.quantization.packed_matrix import PackedMatrix
from bough.quantization.read.rules import LayerKind
from bough.quantization.scheme import ExpertShape, ExpertWeights, Matrix, Part
from bough.quantization.unquantized import DenseExperts
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into


class GgufPacked:
    """The scheme. `exact`: float32 arithmetic on the weights' own values, instead of activations rounded to 8 bits."""

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact

    def matrix(
        self,
        name: str,
        parts: Sequence[Part],
        *,
        kind: LayerKind = "linear",
        dtype: torch.dtype,
        device: torch.device,
    ) -> Matrix:
        return GgufMatrix(parts, dtype, device, exact=self.exact)

    def experts(self, name: str, shape: ExpertShape, *, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
        return DenseExperts(shape, dtype, device)


class GgufMatrix(PackedMatrix):
    """Parts of one block format are packed together."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device, *, exact: bool) -> None:
        super().__init__(parts, dtype, device, exact=exact)
        self._loaded: dict[str, tuple[str, Tensor]] = {}

    def weight_slots(self) -> dict[str, Slot]:
        return {part.slot_name("weight"): Slot(part.shape, partial(self._take, part)) for part in self.parts}

    def _take(self, part: Part, stored: Stored) -> None:
        blocks = _blocks_of(part, stored)
        if blocks is None:
            dense = torch.empty(part.num_rows, part.num_cols, dtype=self.dtype, device=self.device)
            copy_into(dense, stored, part.rows, part.cols)
            self._loaded[part.name] = ("dense", dense)
        else:
            self._loaded[part.name] = (stored.kind, blocks)

    def finish_loading(self) -> None:
        loaded = [self._loaded.pop(part.name) for part in self.parts]
        for kind, group in groupby(loaded, key=lambda item: item[0]):
            tensors = [tensor for _, tensor in group]
            rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            self.pieces.append(rows if kind == "dense" else pack(kind, rows, self.parts[0].num_cols))


def _blocks_of(part: Part, stored: Stored) -> Tensor | None:
    """The blocks of this rank's share, if there is a packed kernel for them and the share ends where blocks do."""
    if not supported(stored.kind):
        return None
    per_block, block_bytes = BLOCK_SIZES[stored.kind]
    first, last, _ = part.cols.indices(part.shape[1])
    start, stop, _ = part.rows.indices(part.shape[0])
    if per_block == 1:  # 16-bit weights: kernels take 32 columns at a time
        per_block, block_bytes = 32, 32 * block_bytes
    if first % per_block or last % per_block:
        return None
    blocks = stored.blocks(start, stop)
    if last - first == part.shape[1]:
        return blocks
    return blocks[:, first // per_block * block_bytes : last // per_block * block_bytes].contiguous()
