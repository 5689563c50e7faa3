"""Packed experts one after the other, each by the packed product that its device has. Waits for the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from bough.kernels.moe.reference import ACTIVATIONS
from bough.kernels.packed_linear import Codes, PackedWeight, pack_codes, packed_linear
from bough.kernels.packed_moe import PackedExperts


def pack_experts(gate_up: Sequence[Codes], down: Sequence[Codes]) -> PackedExperts | None:
    packed = [(pack_codes(first), pack_codes(second)) for first, second in zip(gate_up, down, strict=True)]
    data = tuple(tensor for pair in packed for weight in pair for tensor in weight.data)
    return PackedExperts(data, sys.modules[__name__], packed)


def packed_experts(
    x_TD: Tensor, experts: PackedExperts, topk_weights_Tk: Tensor, topk_ids_Tk: Tensor, activation: str = "silu"
) -> Tensor:
    out = torch.zeros_like(x_TD, dtype=torch.float32)
    act = ACTIVATIONS[activation]
    for expert in sorted(set(topk_ids_Tk.flatten().tolist())):
        if not 0 <= expert < len(experts.handle):
            continue
        gate_up, down = experts.handle[expert]
        token, choice = (topk_ids_Tk == expert).nonzero(as_tuple=True)
        hidden = act(packed_linear(x_TD[token], gate_up))
        part = packed_linear(hidden, down).float() * topk_weights_Tk[token, choice].float().unsqueeze(1)
        out.index_add_(0, token, part)
    return out.to(x_TD.dtype)


def expert_tensors(experts: PackedExperts) -> list[list[Tensor]]:
    return [[tensor for weight in pair for tensor in _tensors(weight)] for pair in experts.handle]


def _tensors(weight: PackedWeight) -> list[Tensor]:
    codes = weight.handle if isinstance(weight.handle, Codes) else None
    inside: list[Tensor | None] = [*weight.data, weight.order]
    if codes is not None:
        inside = [codes.values_OD, codes.scale_OG, codes.zero_OG, codes.row_scale_O, codes.group_of_D, codes.order_D]
    return [tensor for tensor in inside if tensor is not None]
