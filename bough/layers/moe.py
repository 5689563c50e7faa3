"""Mixture of experts: a router picks a few experts a token, all chosen ones are computed grouped. E experts, F width."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bough.config.model_facts import Activation, MoeFacts
from bough.distributed.collectives import all_reduce
from bough.kernels.moe import Routing, fused_experts, routed_experts, topk_softmax
from bough.layers.build import Build
from bough.layers.linear import GateUpLinear, ReplicatedLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.quantization.unquantized import DenseMatrix, Unquantized
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into


class Experts(nn.Module):
    """The experts' weights, stacked; each rank holds a share of every expert's inner units."""

    def __init__(self, facts: MoeFacts, hidden: int, activation: Activation, build: Build) -> None:
        super().__init__()
        self.shape = (facts.intermediate, hidden)
        self.units = build.mesh.slice(facts.intermediate, "inner units of an expert")
        self.activation = activation
        num_units = self.units.stop - self.units.start
        self.gate_up_E2FD = _stack(facts.num_experts, 2 * num_units, hidden, build)
        self.down_EDF = _stack(facts.num_experts, hidden, num_units, build)

    def slots(self) -> dict[str, Slot]:
        num_units = self.units.stop - self.units.start
        slots = {}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_E2FD, self.down_EDF, strict=True)):
            slots[f"{expert}.gate.weight"] = Slot(self.shape, partial(_fill, gate_up[:num_units], self.units, None))
            slots[f"{expert}.up.weight"] = Slot(self.shape, partial(_fill, gate_up[num_units:], self.units, None))
            slots[f"{expert}.down.weight"] = Slot(self.shape[::-1], partial(_fill, down, None, self.units))
        return slots

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        """This rank's share of the sum over each token's experts."""
        return fused_experts(x_TD, self.gate_up_E2FD, self.down_EDF, weights_Tk, ids_Tk, self.activation)

    def routed(self, x_TD: Tensor, residual_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """As `forward`, of the norm of x + residual, whose experts are chosen by it; and x + residual."""
        return routed_experts(x_TD, residual_TD, routing, self.gate_up_E2FD, self.down_EDF, self.activation)


class MixtureOfExperts(nn.Module):
    """Router and experts, and the shared expert where there is one."""

    def __init__(self, facts: MoeFacts, hidden: int, activation: Activation, build: Build) -> None:
        super().__init__()
        self.mesh = build.mesh
        self.experts_per_token = facts.experts_per_token
        self.renormalise = facts.renormalise
        dense = Build(
            scheme=Unquantized(),
            dtype=build.dtype,
            device=build.device,
            context_length=build.context_length,
            mesh=build.mesh,
        )
        self.router = ReplicatedLinear(hidden, facts.num_experts, dense)
        self.experts = Experts(facts, hidden, activation, build)
        self.shared: SharedExpert | None = None
        if facts.shared_intermediate:
            gate = ReplicatedLinear(hidden, 1, dense)
            self.shared = SharedExpert(hidden, facts.shared_intermediate, activation, build, gate)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_Tk, ids_Tk = topk_softmax(self.router(x_TD), self.experts_per_token, self.renormalise)
        out_TD = self.experts(x_TD, weights_Tk, ids_Tk)
        if self.shared is not None:
            out_TD = out_TD + self.shared(x_TD)
        return all_reduce(out_TD, self.mesh)

    def after(self, norm: RMSNorm, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(`forward` of the norm of x + residual, x + residual), which are as `norm.add` takes them. In one launch where the
        device has one for it."""
        if residual_TD is None or self.shared is not None or self._forward_hooks:  # who watches sees what is added
            x_TD, residual_TD = norm.add(x_TD, residual_TD)
            return self(x_TD), residual_TD
        router_ED = cast(DenseMatrix, self.router.matrix).weight
        routing = Routing(norm.weight, norm.eps, norm.offset, router_ED, self.experts_per_token, self.renormalise)
        out_TD, residual_TD = self.experts.routed(x_TD, residual_TD, routing)
        return all_reduce(out_TD, self.mesh), residual_TD


class SharedExpert(nn.Module):
    """The expert that sees every token, weighed by a gate of its own. Returns this rank's share of the sum."""

    def __init__(self, hidden: int, intermediate: int, activation: Activation, build: Build, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.gate_up = GateUpLinear(hidden, intermediate, build, activation=activation)
        self.down = RowLinear(intermediate, hidden, build, reduce=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = torch.sigmoid(self.gate(x_TD)) * self.down(self.gate_up(x_TD))
        return out_TD


def _stack(num_experts: int, num_rows: int, num_cols: int, build: Build) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(num_experts, num_rows, num_cols, dtype=build.dtype, device=build.device), requires_grad=False
    )


def _fill(target: Tensor, rows: slice | None, cols: slice | None, stored: Stored) -> None:
    copy_into(target, stored, rows, cols)
