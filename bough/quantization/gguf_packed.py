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
from bough.kernels.packed_linear import dequantise, pack, supported
from bough.kernels.packed_moe import PackedExperts, expert_tensors, group_experts, packed_experts
from bough.quantization.packed_matrix import PackedMatrix
from bough.quantization.read.rules import LayerKind
from bough.quantization.scheme import ExpertShape, ExpertWeights, Matrix, Part
from bough.quantization.unquantized import BiasedExperts, DenseExperts, check_gated, expert_parts
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
        check_gated(shape)
        if shape.clamped is not None:
            return BiasedExperts(shape, dtype, device)
        return GgufExperts(shape, dtype, device, exact=self.exact)


class GgufMatrix(PackedMatrix):
    """Parts of one block format are packed together."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device, *, exact: bool) -> None:
        super().__init__(parts, dtype, device, exact=exact)
        self._loaded: dict[str, tuple[str, Tensor]] = {}

    def weight_slots(self) -> dict[str, Slot]:
        return {part.slot_name("weight"): Slot(part.shape, partial(self._take, part)) for part in self.parts}

    def _take(self, part: Part, stored: Stored) -> None:
        blocks = _blocks_of(part, stored, self.device)
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


class GgufExperts(ExpertWeights):
    """Experts whose blocks stay packed; dequantised if a share of theirs ends within a block, or has no packed kernel."""

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device, *, exact: bool) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.exact = exact
        self.packed: PackedExperts | None = None
        self.plain: DenseExperts | None = None
        self._loaded: dict[tuple[int, str], tuple[str, Tensor]] = {}

    def weight_slots(self) -> dict[str, Slot]:
        return {
            f"{expert}.{part.slot_name('weight')}": Slot(part.shape, partial(self._take, expert, part))
            for expert in range(self.shape.num_experts)
            for part in expert_parts(self.shape)
        }

    def _take(self, expert: int, part: Part, stored: Stored) -> None:
        blocks = _blocks_of(part, stored, self.device)
        if blocks is None:
            dense = torch.empty(part.num_rows, part.num_cols, dtype=self.dtype, device=self.device)
            copy_into(dense, stored, part.rows, part.cols)
            self._loaded[expert, part.name] = ("dense", dense)
        else:
            self._loaded[expert, part.name] = (stored.kind, blocks)

    def finish_loading(self) -> None:
        loaded, self._loaded = self._loaded, {}
        of = [[loaded[expert, name] for name in ("gate", "up", "down")] for expert in range(self.shape.num_experts)]
        if all(gate[0] == up[0] != "dense" and down[0] != "dense" for gate, up, down in of):
            gate_up = [pack(gate[0], torch.cat((gate[1], up[1])), self.shape.hidden) for gate, up, _ in of]
            down = [pack(kind, blocks, self.shape.num_units) for _, _, (kind, blocks) in of]
            self.packed = group_experts(gate_up, down, exact=self.exact)
        if self.packed is None:
            self.plain = DenseExperts(self.shape, self.dtype, self.device)
            units = self.shape.num_units
            for expert, (gate, up, back) in enumerate(of):
                self.plain.gate_up_E2FD[expert, :units].copy_(_floats(gate, self.shape.hidden))
                self.plain.gate_up_E2FD[expert, units:].copy_(_floats(up, self.shape.hidden))
                self.plain.down_EDF[expert].copy_(_floats(back, units))

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        if self.packed is None:
            assert self.plain is not None, "weights are there once loading has finished"
            return self.plain.forward(x_TD, weights_Tk, ids_Tk)
        return packed_experts(x_TD, self.packed, weights_Tk, ids_Tk, self.shape.activation)

    def expert_tensors(self) -> list[list[Tensor]]:
        if self.packed is not None:
            return expert_tensors(self.packed)
        assert self.plain is not None, "weights are there once loading has finished"
        return self.plain.expert_tensors()


def _floats(loaded: tuple[str, Tensor], cols: int) -> Tensor:
    kind, tensor = loaded
    return tensor if kind == "dense" else dequantise(pack(kind, tensor, cols))


def _blocks_of(part: Part, stored: Stored, device: torch.device) -> Tensor | None:
    """The blocks of this rank's share, on the device, if there is a packed kernel for them and the share ends where blocks
    do."""
    if not supported(stored.kind, device):
        return None
    per_block, block_bytes = BLOCK_SIZES[stored.kind]
    first, last, _ = part.cols.indices(part.shape[1])
    start, stop, _ = part.rows.indices(part.shape[0])
    if per_block == 1:  # 16-bit weights: kernels take 32 columns at a time
        per_block, block_bytes = 32, 32 * block_bytes
    if first % per_block or last % per_block:
        return None
    blocks = stored.blocks(start, stop)
    if last - first != part.shape[1]:
        blocks = blocks[:, first // per_block * block_bytes : last // per_block * block_bytes].contiguous()
    return blocks.to(device)
