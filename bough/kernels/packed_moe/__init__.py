"""Experts whose weights stay packed in memory.

in: `Codes` of every expert, activations, chosen experts. out: weighted sums of expert outputs. never: a checkpoint's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.kernels import choices
from bough.kernels.choices import Choice, Choices
from bough.kernels.moe import Biases
from bough.kernels.packed_linear import Codes, PackedWeight

__all__ = ["PackedExperts", "expert_tensors", "group_experts", "pack_experts", "packed_experts"]

_IMPLEMENTATIONS = Choices(
    Choice("triton", f"{__name__}.triton", needs=choices.cuda()),
    Choice("cpu", f"{__name__}.cpu", needs=choices.cpu),
    Choice("reference", f"{__name__}.reference"),
)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The weights of a layer's experts."""

    data: tuple[Tensor, ...]
    """What takes memory."""
    functions: ModuleType = field(repr=False)
    """The implementation that packed them."""
    handle: Any = field(repr=False)
    """Known to that implementation alone."""


def pack_experts(gate_up: Sequence[Codes], down: Sequence[Codes], biases: Biases | None = None) -> PackedExperts | None:
    """Keeps experts packed, on the device where their codes are: gate above up [2F, D], and down [D, F], of each. None if
    there is no kernel for codes like these there, or if experts differ in how they are stored."""
    device = gate_up[0].values_OD.device
    packed: PackedExperts | None = _IMPLEMENTATIONS.pick("pack_experts", device)(gate_up, down, biases)
    return packed


def group_experts(
    gate_up: Sequence[PackedWeight],
    down: Sequence[PackedWeight],
    biases: Biases | None = None,
    *,
    exact: bool = False,
) -> PackedExperts | None:
    """The same of weights that `packed_linear` has packed already. `exact`: as of `packed_linear`."""
    device = gate_up[0].data[0].device
    packed: PackedExperts | None = _IMPLEMENTATIONS.pick("group_experts", device)(gate_up, down, biases, exact=exact)
    return packed


def packed_experts(
    x_TD: Tensor,
    experts: PackedExperts,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
    clamp: ClampedGate | None = None,
) -> Tensor:
    """As `moe.fused_experts`, [T, D]; with `clamp` as `moe.biased_experts`, with the biases that they were packed with."""
    out: Tensor = experts.functions.packed_experts(x_TD, experts, topk_weights_Tk, topk_ids_Tk, activation, clamp)
    return out


def expert_tensors(experts: PackedExperts) -> list[list[Tensor]]:
    """By expert: views of all that is kept of it (codes, scales, zero points, orders), in the same order for each. An expert
    whose tensors are overwritten by another's becomes that expert."""
    found: list[list[Tensor]] = experts.functions.expert_tensors(experts)
    return found
