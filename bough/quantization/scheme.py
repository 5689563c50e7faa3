"""The contract between layers and weight schemes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bough.config.model_facts import Activation, ClampedGate
from bough.kernels.moe import Choosing, Routing, route
from bough.kernels.norm import add_rms_norm
from bough.quantization.read.rules import LayerKind
from bough.weights.slots import Slot


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix that come from one tensor of the checkpoint."""

    name: str
    """Slots are named by it: "q", "gate"; "" for a matrix of one part."""
    shape: tuple[int, int]
    """Of the whole tensor."""
    rows: slice
    cols: slice
    """What this rank holds of it."""

    @property
    def num_rows(self) -> int:
        return len(range(*self.rows.indices(self.shape[0])))

    @property
    def num_cols(self) -> int:
        return len(range(*self.cols.indices(self.shape[1])))

    def slot_name(self, last: str) -> str:
        return f"{self.name}.{last}" if self.name else last


class Matrix(nn.Module, ABC):
    """A weight [O, D] of one rank, parts on top of one another."""

    @abstractmethod
    def weight_slots(self) -> dict[str, Slot]:
        """One `weight` for each part, and whatever else the scheme keeps (scales ...)."""

    @abstractmethod
    def forward(self, x_TD: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) -> [T, O] in the dtype of x."""

    def some_rows(self, x_TD: Tensor, rows: slice, bias: Tensor | None = None) -> Tensor:
        """`forward` by some of the weight's rows, with their bias -> [T, rows]. Schemes that can, compute no others."""
        out: Tensor = self(x_TD)[:, rows]
        return out if bias is None else out + bias

    def after_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_D: Tensor, eps: float, offset: float, bias_O: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.linear.linear_after_norm`."""
        normed_TD, total_TD = add_rms_norm(x_TD, residual_TD, norm_D, eps, offset=offset)
        return self.forward(normed_TD, bias_O), total_TD

    def onto(self, x_TD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `kernels.linear.linear_onto`."""
        out_TO: Tensor = self(x_TD)
        return out_TO, stream_TO

    @abstractmethod
    def gated(self, x_TD: Tensor, activation: Activation, bias_O: Tensor | None = None) -> Tensor:
        """activation(first half of x @ weight.T) * second half -> [T, O / 2]."""

    @abstractmethod
    def lookup(self, ids_T: Tensor) -> Tensor:
        """Rows `ids_T` -> [T, D] in the model's dtype."""

    def table(self) -> Tensor | None:
        """[O, D] in the model's dtype, if that is how it is kept: `lookup` gives rows of it."""
        return None


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of one layer. E experts, F inner units each, D width."""

    num_experts: int
    hidden: int
    """D"""
    intermediate: int
    """F of the whole model."""
    units: slice
    """The inner units of every expert that this rank holds."""
    activation: Activation
    clamped: ClampedGate | None = None
    """In place of `activation`; products then have biases."""
    gated: bool = True
    """Whether experts have gates; otherwise they are down(activation(up(x)))."""
    adds_bias: bool = True
    """Whether this rank adds the last product's bias: one of those that split an expert does."""

    @property
    def num_units(self) -> int:
        return len(range(*self.units.indices(self.intermediate)))


class ExpertWeights(nn.Module, ABC):
    """The weights of a layer's experts on one rank."""

    @abstractmethod
    def weight_slots(self) -> dict[str, Slot]:
        """`3.gate.weight`, `3.up.weight`, `3.down.weight` of each expert, and whatever else the scheme keeps."""

    @abstractmethod
    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        """As `kernels.moe.fused_experts` -> [T, D]: this rank's share of the sum over each token's experts."""

    @abstractmethod
    def expert_tensors(self) -> list[list[Tensor]]:
        """By expert: views of all tensors that are kept of it, scales too, in the same order for each; once loaded. An
        expert whose tensors are overwritten by another's becomes that expert."""

    def routed(self, x_TD: Tensor, residual_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """As `kernels.moe.routed_experts`: `forward` of the norm of x + residual, whose experts are chosen by it; and
        x + residual."""
        normed_TD, total_TD = add_rms_norm(x_TD, residual_TD, routing.norm_D, routing.eps, offset=routing.offset)
        how = Choosing(routing.per_token, routing.renormalise)
        weights_Tk, ids_Tk = route(normed_TD, routing.router_ED, None, how, routing.loc_T)
        return self.forward(normed_TD, weights_Tk, ids_Tk), total_TD


class Scheme(Protocol):
    """Decides how each layer keeps its weights. `name` is a layer's path in the model, `layers.0.qkv`; `dtype` is that of
    activations."""

    def matrix(
        self,
        name: str,
        parts: Sequence[Part],
        *,
        kind: LayerKind = "linear",
        dtype: torch.dtype,
        device: torch.device,
    ) -> Matrix:
        """An empty matrix with these parts."""
        ...

    def experts(self, name: str, shape: ExpertShape, *, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
        """Empty weights of a layer's experts."""
        ...
