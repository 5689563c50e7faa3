"""Experts of a quantised checkpoint, or of floats that are quantised while they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from bough.kernels.packed_linear import Codes
from bough.kernels.packed_moe import PackedExperts, expert_tensors, pack_experts, packed_experts
from bough.quantization.loading import PartLoader, Source, dequantised, joined
from bough.quantization.scheme import ExpertShape, ExpertWeights
from bough.quantization.unquantized import DenseExperts
from bough.weights.dummy import DummyDraw
from bough.weights.slots import Slot

_log = logging.getLogger(__name__)

Loaders = list[list[PartLoader]]
"""Of gate, up and down of each expert."""


def _loaders(sources: Sequence[Sequence[Source]], dtype: torch.dtype, device: torch.device) -> Loaders:
    return [[PartLoader(source, dtype, device) for source in each] for each in sources]


def _slots(loaders: Loaders) -> dict[str, Slot]:
    return {
        f"{expert}.{name}": slot
        for expert, each in enumerate(loaders)
        for loader in each
        for name, slot in loader.slots().items()
    }


def _draw(loaders: Loaders, shape: ExpertShape, name: str, draw: DummyDraw) -> None:
    """Gives every expert the floats that plain experts of this name would have drawn."""
    like = loaders[0][0]
    plain = DenseExperts(shape, like.dtype, like.device)
    for last, parameter in plain.named_parameters():
        draw.fill(f"{name}.{last}", parameter)
    for (gate, up, down), gate_up_2FD, down_DF in zip(loaders, plain.gate_up_E2FD, plain.down_EDF, strict=True):
        gate.give(gate_up_2FD[: shape.num_units])
        up.give(gate_up_2FD[shape.num_units :])
        down.give(down_DF)


class CodedExperts(ExpertWeights):
    """Experts stay packed where there is a kernel for it, and become plain floats otherwise."""

    def __init__(
        self, shape: ExpertShape, sources: Sequence[Sequence[Source]], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.packed: PackedExperts | None = None
        self.plain: DenseExperts | None = None
        self._loaders = _loaders(sources, dtype, device)

    def weight_slots(self) -> dict[str, Slot]:
        return _slots(self._loaders)

    def draw_dummies(self, name: str, draw: DummyDraw) -> None:
        _draw(self._loaders, self.shape, name, draw)
        self.finish_loading()

    def finish_loading(self) -> None:
        gate_up: list[list[Codes | Tensor]] = []
        down: list[Codes | Tensor] = []
        for gate, up, back in self._loaders:
            gate_up.append(joined([gate.result(), up.result()]))
            down.append(back.result())
        codes_up = [pieces[0] for pieces in gate_up if len(pieces) == 1 and isinstance(pieces[0], Codes)]
        codes_down = [piece for piece in down if isinstance(piece, Codes)]
        if len(codes_up) == len(codes_down) == len(down):
            self.packed = pack_experts(codes_up, codes_down)
        if self.packed is None:
            _log.warning("experts are dequantised: their parts are stored in ways that no kernel takes together")
            self.plain = DenseExperts(self.shape, self.dtype, self.device)
            for expert, (pieces, piece) in enumerate(zip(gate_up, down, strict=True)):
                self.plain.gate_up_E2FD[expert].copy_(torch.cat([_floats(each) for each in pieces]))
                self.plain.down_EDF[expert].copy_(_floats(piece))

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


class DequantisedExperts(DenseExperts):
    """Plain tensors, from experts in any format."""

    def __init__(
        self, shape: ExpertShape, sources: Sequence[Sequence[Source]], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shape, dtype, device)
        self._loaders = _loaders(sources, dtype, device)

    def weight_slots(self) -> dict[str, Slot]:
        return _slots(self._loaders)

    def draw_dummies(self, name: str, draw: DummyDraw) -> None:
        _draw(self._loaders, self.shape, name, draw)
        self.finish_loading()

    def finish_loading(self) -> None:
        units = self.shape.num_units
        for (gate, up, down), gate_up_2FD, down_DF in zip(self._loaders, self.gate_up_E2FD, self.down_EDF, strict=True):
            gate_up_2FD[:units].copy_(_floats(gate.result()))
            gate_up_2FD[units:].copy_(_floats(up.result()))
            down_DF.copy_(_floats(down.result()))


def _floats(piece: Codes | Tensor) -> Tensor:
    return piece if isinstance(piece, Tensor) else dequantised(piece)
