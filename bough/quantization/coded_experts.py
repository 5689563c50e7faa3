"""Experts of a quantised checkpoint, or of floats that are quantised while they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bough.kernels.moe import Biases, Routing
from bough.kernels.packed_linear import Codes
from bough.kernels.packed_moe import PackedExperts, expert_tensors, pack_experts, packed_experts
from bough.quantization.loading import PartLoader, Source, dequantised, joined
from bough.quantization.scheme import ExpertShape, ExpertWeights
from bough.quantization.unquantized import BiasedExperts, DenseExperts, bias_slots, zeros
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
        self.gate_up_bias_E2F: nn.Parameter | None = None
        self.down_bias_ED: nn.Parameter | None = None
        if shape.clamped is not None:
            self.gate_up_bias_E2F = zeros((shape.num_experts, 2 * shape.num_units), dtype, device)
            self.down_bias_ED = zeros((shape.num_experts, shape.hidden), dtype, device)
        self._loaders = _loaders(sources, dtype, device)

    def weight_slots(self) -> dict[str, Slot]:
        slots = _slots(self._loaders)
        if self.gate_up_bias_E2F is not None and self.down_bias_ED is not None:
            slots |= bias_slots(self.shape, self.gate_up_bias_E2F, self.down_bias_ED)
        return slots

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
            self.packed = pack_experts(codes_up, codes_down, self._biases)
        if self.packed is None:
            _log.warning("experts are dequantised: their parts are stored in ways that no kernel takes together")
            self.plain = self._dequantised(gate_up, down)

    @property
    def _biases(self) -> Biases | None:
        if self.gate_up_bias_E2F is None or self.down_bias_ED is None:
            return None
        return Biases(self.gate_up_bias_E2F, self.down_bias_ED)

    def _dequantised(self, gate_up: list[list[Codes | Tensor]], down: list[Codes | Tensor]) -> DenseExperts:
        biases = self._biases
        plain = (DenseExperts if biases is None else BiasedExperts)(self.shape, self.dtype, self.device)
        for expert, (pieces, piece) in enumerate(zip(gate_up, down, strict=True)):
            plain.gate_up_E2FD[expert].copy_(torch.cat([_floats(each) for each in pieces]))
            plain.down_EDF[expert].copy_(_floats(piece))
        if biases is not None and isinstance(plain, BiasedExperts):
            plain.gate_up_bias_E2F.copy_(biases.gate_up_E2F)
            plain.down_bias_ED.copy_(biases.down_ED)
        return plain

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        if self.packed is None:
            assert self.plain is not None, "weights are there once loading has finished"
            return self.plain.forward(x_TD, weights_Tk, ids_Tk)
        return packed_experts(x_TD, self.packed, weights_Tk, ids_Tk, self.shape.activation, self.shape.clamped)

    def expert_tensors(self) -> list[list[Tensor]]:
        if self.packed is not None:
            return expert_tensors(self.packed)
        assert self.plain is not None, "weights are there once loading has finished"
        return self.plain.expert_tensors()


class DequantisedExperts(ExpertWeights):
    """Plain tensors, from experts in any format."""

    def __init__(
        self, shape: ExpertShape, sources: Sequence[Sequence[Source]], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shape = shape
        self.plain = (DenseExperts if shape.clamped is None else BiasedExperts)(shape, dtype, device)
        self._loaders = _loaders(sources, dtype, device)

    def weight_slots(self) -> dict[str, Slot]:
        biases = {name: slot for name, slot in self.plain.weight_slots().items() if name.endswith(".bias")}
        return {**_slots(self._loaders), **biases}

    def draw_dummies(self, name: str, draw: DummyDraw) -> None:
        _draw(self._loaders, self.shape, name, draw)
        self.finish_loading()

    def finish_loading(self) -> None:
        units, plain = self.shape.num_units, self.plain
        stacks = zip(self._loaders, plain.gate_up_E2FD, plain.down_EDF, strict=True)
        for (gate, up, down), gate_up_2FD, down_DF in stacks:
            gate_up_2FD[:units].copy_(_floats(gate.result()))
            gate_up_2FD[units:].copy_(_floats(up.result()))
            down_DF.copy_(_floats(down.result()))

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        return self.plain.forward(x_TD, weights_Tk, ids_Tk)

    def routed(self, x_TD: Tensor, residual_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return self.plain.routed(x_TD, residual_TD, routing)

    def expert_tensors(self) -> list[list[Tensor]]:
        return self.plain.expert_tensors()


def _floats(piece: Codes | Tensor) -> Tensor:
    return piece if isinstance(piece, Tensor) else dequantised(piece)
