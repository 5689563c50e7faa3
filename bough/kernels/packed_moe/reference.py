"""Packed experts one after the other, each by the packed product that its device has. Waits for the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.kernels.moe import Biases, clamped_gate
from bough.kernels.moe.reference import ACTIVATIONS
from bough.kernels.packed_linear import Codes, PackedWeight, pack_codes, packed_linear
from bough.kernels.packed_moe import PackedExperts


@dataclass(frozen=True, slots=True, eq=False)
class _OneByOne:
    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    biases: Biases | None
    exact: bool


def pack_experts(gate_up: Sequence[Codes], down: Sequence[Codes], biases: Biases | None = None) -> PackedExperts | None:
    return group_experts([pack_codes(each) for each in gate_up], [pack_codes(each) for each in down], biases)


def group_experts(
    gate_up: Sequence[PackedWeight],
    down: Sequence[PackedWeight],
    biases: Biases | None = None,
    *,
    exact: bool = False,
) -> PackedExperts:
    data = tuple(tensor for weight in (*gate_up, *down) for tensor in weight.data)
    if biases is not None:
        data += (biases.gate_up_E2F, biases.down_ED)
    return PackedExperts(data, sys.modules[__name__], _OneByOne(gate_up, down, biases, exact))


def packed_experts(
    x_TD: Tensor,
    experts: PackedExperts,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
    clamp: ClampedGate | None = None,
) -> Tensor:
    held: _OneByOne = experts.handle
    out = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in sorted(set(topk_ids_Tk.flatten().tolist())):
        if not 0 <= expert < len(held.gate_up):
            continue
        token, choice = (topk_ids_Tk == expert).nonzero(as_tuple=True)
        first, second = (
            (None, None)
            if held.biases is None
            else (held.biases.gate_up_E2F[expert].float(), held.biases.down_ED[expert].float())
        )
        gate_up = packed_linear(x_TD[token], held.gate_up[expert], first, exact=held.exact)
        hidden = ACTIVATIONS[activation](gate_up) if clamp is None else clamped_gate(gate_up, clamp.alpha, clamp.limit)
        part = packed_linear(hidden, held.down[expert], second, exact=held.exact).float()
        out.index_add_(0, token, part * topk_weights_Tk[token, choice].float().unsqueeze(1))
    return out.to(x_TD.dtype)


def expert_tensors(experts: PackedExperts) -> list[list[Tensor]]:
    held: _OneByOne = experts.handle
    found = [[*_tensors(first), *_tensors(second)] for first, second in zip(held.gate_up, held.down, strict=True)]
    return with_biases(found, held.biases)


def with_biases(found: list[list[Tensor]], biases: Biases | None) -> list[list[Tensor]]:
    """Each expert's tensors, and its biases."""
    if biases is None:
        return found
    beside = zip(found, biases.gate_up_E2F, biases.down_ED, strict=True)
    return [[*each, first, second] for each, first, second in beside]


def _tensors(weight: PackedWeight) -> list[Tensor]:
    codes = weight.handle if isinstance(weight.handle, Codes) else None
    inside: list[Tensor | None] = [*weight.data, weight.order]
    if codes is not None:
        inside = [codes.values_OD, codes.scale_OG, codes.zero_OG, codes.row_scale_O, codes.group_of_D, codes.order_D]
    return [tensor for tensor in inside if tensor is not None]
