"""Weights as plain tensors in the dtype of the activations. Block formats are dequantised on the way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.gguf_header import BLOCK_SIZES
from bough.config.model_facts import Activation
from bough.core.errors import ConfigError
from bough.kernels.activation import gelu_mul, gelu_tanh_mul, relu2_mul, relu_mul, silu_mul
from bough.kernels.linear import linear, linear_after_norm, linear_onto, linear_silu_mul
from bough.kernels.moe import Biases, Routing, biased_experts, fused_experts, plain_experts, routed_experts
from bough.kernels.pitch import empty_rows
from bough.kernels.rows import take_rows
from bough.quantization.read.rules import LayerKind
from bough.quantization.scheme import ExpertShape, ExpertWeights, Matrix, Part
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into

PLAIN_KINDS: Final = frozenset({"F64", "F32", "F16", "BF16", *BLOCK_SIZES})
"""What plain weights may be stored as: floats, and GGUF's blocks, which are dequantised."""
GATES: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_tanh_mul,
    "gelu": gelu_mul,
    "relu": relu_mul,
    "relu2": relu2_mul,
}


PLAIN_ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Of experts without gates."""


class Unquantized:
    """The scheme."""

    def matrix(
        self,
        name: str,
        parts: Sequence[Part],
        *,
        kind: LayerKind = "linear",
        dtype: torch.dtype,
        device: torch.device,
    ) -> Matrix:
        return DenseMatrix(parts, dtype, device)

    def experts(self, name: str, shape: ExpertShape, *, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
        return dense_experts(shape, dtype, device)


class DenseMatrix(Matrix):
    """One tensor."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.parts = tuple(parts)
        num_rows = sum(part.num_rows for part in parts)
        self.weight = nn.Parameter(empty_rows(num_rows, parts[0].num_cols, dtype, device), requires_grad=False)

    def weight_slots(self) -> dict[str, Slot]:
        slots, start = {}, 0
        for part in self.parts:
            target = self.weight[start : start + part.num_rows]
            slots[part.slot_name("weight")] = Slot(part.shape, partial(_fill, target, part), kinds=PLAIN_KINDS)
            start += part.num_rows
        return slots

    def forward(self, x_TD: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return linear(x_TD, self.weight, bias_O)

    def some_rows(self, x_TD: Tensor, rows: slice, bias: Tensor | None = None) -> Tensor:
        return linear(x_TD, self.weight[rows], bias)

    def after_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_D: Tensor, eps: float, offset: float, bias_O: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return linear_after_norm(x_TD, residual_TD, norm_D, eps, self.weight, bias_O, offset=offset)

    def onto(self, x_TD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_onto(x_TD, self.weight, stream_TO)

    def gated(self, x_TD: Tensor, activation: Activation, bias_O: Tensor | None = None) -> Tensor:
        if activation == "silu" and bias_O is None:
            return linear_silu_mul(x_TD, self.weight)
        return GATES[activation](linear(x_TD, self.weight, bias_O))

    def lookup(self, ids_T: Tensor) -> Tensor:
        return take_rows(ids_T, self.weight)[0]

    def table(self) -> Tensor | None:
        return self.weight


def expert_parts(shape: ExpertShape) -> tuple[Part, ...]:
    """gate (if there is one), up and down of one expert."""
    inner, outer, units = shape.intermediate, shape.hidden, shape.units
    firsts = tuple(Part(name, (inner, outer), units, slice(None)) for name in ("gate", "up")[not shape.gated :])
    return (*firsts, Part("down", (outer, inner), slice(None), units))


class DenseExperts(ExpertWeights):
    """All experts' weights in two tensors."""

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        count, units, hidden = shape.num_experts, shape.num_units, shape.hidden
        gate_up_E2FD = torch.empty(count, 2 * units, hidden, dtype=dtype, device=device)
        self.gate_up_E2FD = nn.Parameter(gate_up_E2FD, requires_grad=False)
        self.down_EDF = nn.Parameter(torch.empty(count, hidden, units, dtype=dtype, device=device), requires_grad=False)

    def weight_slots(self) -> dict[str, Slot]:
        num_units = self.shape.num_units
        gate, up, back = expert_parts(self.shape)
        slots: dict[str, Slot] = {}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_E2FD, self.down_EDF, strict=True)):
            targets = ((gate, gate_up[:num_units]), (up, gate_up[num_units:]), (back, down))
            slots |= {
                f"{expert}.{part.slot_name('weight')}": Slot(
                    part.shape, partial(_fill, target, part), kinds=PLAIN_KINDS
                )
                for part, target in targets
            }
        return slots

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        return fused_experts(x_TD, self.gate_up_E2FD, self.down_EDF, weights_Tk, ids_Tk, self.shape.activation)

    def expert_tensors(self) -> list[list[Tensor]]:
        return [list(each) for each in zip(self.gate_up_E2FD, self.down_EDF, strict=True)]

    def routed(self, x_TD: Tensor, residual_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return routed_experts(x_TD, residual_TD, routing, self.gate_up_E2FD, self.down_EDF, self.shape.activation)


class BiasedExperts(DenseExperts):
    """With biases, and gates that are clamped."""

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        count, units, hidden = shape.num_experts, shape.num_units, shape.hidden
        self.gate_up_bias_E2F = zeros((count, 2 * units), dtype, device)
        self.down_bias_ED = zeros((count, hidden), dtype, device)

    def weight_slots(self) -> dict[str, Slot]:
        return {**super().weight_slots(), **bias_slots(self.shape, self.gate_up_bias_E2F, self.down_bias_ED)}

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        gate = self.shape.clamped
        assert gate is not None, "other experts are DenseExperts"
        biases = Biases(self.gate_up_bias_E2F, self.down_bias_ED)
        return biased_experts(
            x_TD, self.gate_up_E2FD, self.down_EDF, biases, weights_Tk, ids_Tk, gate.alpha, gate.limit
        )  # fmt: skip

    def expert_tensors(self) -> list[list[Tensor]]:
        biases = zip(self.gate_up_bias_E2F, self.down_bias_ED, strict=True)
        return [[*each, *its] for each, its in zip(super().expert_tensors(), biases, strict=True)]

    def routed(self, x_TD: Tensor, residual_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return ExpertWeights.routed(self, x_TD, residual_TD, routing)


class UngatedExperts(ExpertWeights):
    """All experts' weights in two tensors, without gates."""

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        count, units, hidden = shape.num_experts, shape.num_units, shape.hidden
        self.up_EFD = nn.Parameter(torch.empty(count, units, hidden, dtype=dtype, device=device), requires_grad=False)
        self.down_EDF = nn.Parameter(torch.empty(count, hidden, units, dtype=dtype, device=device), requires_grad=False)

    def weight_slots(self) -> dict[str, Slot]:
        parts = expert_parts(self.shape)
        return {
            f"{expert}.{part.slot_name('weight')}": Slot(part.shape, partial(_fill, target, part), kinds=PLAIN_KINDS)
            for expert, targets in enumerate(self.expert_tensors())
            for part, target in zip(parts, targets, strict=True)
        }

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        act = PLAIN_ACTIVATIONS[self.shape.activation]
        return plain_experts(x_TD, self.up_EFD, self.down_EDF, weights_Tk, ids_Tk, act)

    def expert_tensors(self) -> list[list[Tensor]]:
        return [list(each) for each in zip(self.up_EFD, self.down_EDF, strict=True)]


def dense_experts(shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    """Experts as plain tensors, of the kind that the shape describes."""
    if not shape.gated:
        return UngatedExperts(shape, dtype, device)
    return (DenseExperts if shape.clamped is None else BiasedExperts)(shape, dtype, device)


def check_gated(shape: ExpertShape) -> None:
    """Raises `ConfigError` for experts without gates, of which there are no packed ones."""
    if not shape.gated:
        raise ConfigError(
            what="experts without gates can't be quantized",
            why="there are no kernels for packed ones",
            fix="choose a checkpoint whose experts are in bfloat16",
        )


def bias_slots(shape: ExpertShape, gate_up_bias_E2F: Tensor, down_bias_ED: Tensor) -> dict[str, Slot]:
    """The slots of all experts' biases."""
    inner, outer, count = shape.intermediate, shape.hidden, shape.num_units
    units, here = shape.units, slice(0, outer if shape.adds_bias else 0)
    slots: dict[str, Slot] = {}
    for expert, (gate_up, down) in enumerate(zip(gate_up_bias_E2F, down_bias_ED, strict=True)):
        slots[f"{expert}.gate.bias"] = Slot((inner,), partial(_fill_some, gate_up[:count], units))
        slots[f"{expert}.up.bias"] = Slot((inner,), partial(_fill_some, gate_up[count:], units))
        slots[f"{expert}.down.bias"] = Slot((outer,), partial(_fill_some, down[here], here))
    return slots


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)


def _fill_some(target: Tensor, rows: slice, stored: Stored) -> None:
    copy_into(target, stored, rows)


def _fill(target: Tensor, part: Part, stored: Stored) -> None:
    copy_into(target, stored, part.rows, part.cols)
