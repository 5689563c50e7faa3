"""GGUF blocks kept packed: a few bits a weight in memory, unpacked inside the multiplication.

Parts of a fused layer may come in different block formats (Q4_K_M files mix them); neighbours of one format are packed
together, others stay matrices of their own whose results are concatenated. What has no packed kernel here is dequantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from bough.config.gguf_header import BLOCK_SIZES
from bough.kernels.linear import linear
from bough.kernels.packed_linear import PackedWeight, pack, packed_linear, supported
from bough.quantization.gguf_rows import dequantise_rows
from bough.quantization.scheme import Activation, Matrix, Part
from bough.quantization.unquantized import GATES
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into, is_packed


class GgufPacked:
    """The scheme."""

    def matrix(self, parts: Sequence[Part], *, dtype: torch.dtype, device: torch.device) -> Matrix:
        return PackedMatrix(parts, dtype, device)


class PackedMatrix(Matrix):
    """Packed pieces, top to bottom."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.dtype = dtype
        self.device = device
        self.pieces: list[PackedWeight | Tensor] = []
        self._loaded: dict[str, tuple[str, Tensor]] = {}
        self._table: tuple[str, Tensor] | None = None
        """Kind and rows on disk, for `lookup`: pages of the file are touched where a row is looked up."""

    def weight_slots(self) -> dict[str, Slot]:
        return {part.slot_name("weight"): Slot(part.shape, partial(self._take, part)) for part in self.parts}

    def _take(self, part: Part, stored: Stored) -> None:
        start, stop, _ = part.rows.indices(part.shape[0])
        if is_packed(stored) and supported(stored.kind, self.device):
            blocks = stored.blocks(start, stop)
            if part.num_cols == part.shape[1]:
                self._loaded[part.name] = (stored.kind, blocks)
                return
            per_block, block_bytes = BLOCK_SIZES[stored.kind]
            first, last, _ = part.cols.indices(part.shape[1])
            if first % per_block == last % per_block == 0:
                cut = slice(first // per_block * block_bytes, last // per_block * block_bytes)
                self._loaded[part.name] = (stored.kind, blocks[:, cut].contiguous())
                return
        dense = torch.empty(part.num_rows, part.num_cols, dtype=self.dtype, device=self.device)
        copy_into(dense, stored, part.rows, part.cols)
        self._loaded[part.name] = ("dense", dense)

    def finish_loading(self) -> None:
        loaded = [self._loaded[part.name] for part in self.parts]
        self._loaded = {}
        num_cols = self.parts[0].num_cols
        if len(loaded) == 1 and loaded[0][0] != "dense":
            self._table = loaded[0]
        for kind, group in groupby(loaded, key=lambda item: item[0]):
            tensors = [tensor for _, tensor in group]
            rows = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            self.pieces.append(rows if kind == "dense" else pack(kind, rows, num_cols))

    def forward(self, x_TD: Tensor, bias_O: Tensor | None = None) -> Tensor:
        results = [
            linear(x_TD, piece) if isinstance(piece, Tensor) else packed_linear(x_TD, piece) for piece in self.pieces
        ]
        out = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        return out if bias_O is None else out + bias_O

    def gated(self, x_TD: Tensor, activation: Activation, bias_O: Tensor | None = None) -> Tensor:
        return GATES[activation](self(x_TD, bias_O))

    def lookup(self, ids_T: Tensor) -> Tensor:
        if self._table is None:
            (piece,) = self.pieces
            assert isinstance(piece, Tensor)
            return torch.nn.functional.embedding(ids_T, piece)
        kind, rows = self._table
        return dequantise_rows(kind, rows[ids_T]).to(self.dtype)
