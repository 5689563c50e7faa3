"""Packed experts on the CPU, grouped, by the compiled kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.kernels.moe import Biases
from bough.kernels.moe.cpu import ACTIVATIONS, CLAMPED, Stack, available
from bough.kernels.packed_linear import Codes, PackedWeight, pack_codes
from bough.kernels.packed_moe import PackedExperts, reference
from bough.kernels.packed_moe.reference import with_biases

__all__ = ["available", "expert_tensors", "group_experts", "pack_experts", "packed_experts"]


@dataclass(frozen=True, slots=True, eq=False)
class _Grouped:
    """What `packed_experts` passes to the library, and what it points at."""

    stack: Stack
    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    orders: tuple[Tensor, ...]
    biases: Biases | None


_ROWS = 16
"""Of a group, in the C++ code: gate and up begin with one."""


def pack_experts(gate_up: Sequence[Codes], down: Sequence[Codes], biases: Biases | None = None) -> PackedExperts | None:
    return group_experts([pack_codes(each) for each in gate_up], [pack_codes(each) for each in down], biases)


def group_experts(
    gate_up: Sequence[PackedWeight],
    down: Sequence[PackedWeight],
    biases: Biases | None = None,
    *,
    exact: bool = False,
) -> PackedExperts:
    """Weights that are packed already; one by one, by the reference, where the kernels don't take them together."""
    inner, width = gate_up[0].rows // 2, down[0].rows
    orders = _stacked_orders(gate_up), _stacked_orders(down)
    if inner % _ROWS or None in orders or not (_alike(gate_up) and _alike(down)):
        return reference.group_experts(gate_up, down, biases, exact=exact)
    stack = Stack([each.address for each in gate_up], [each.address for each in down], width, inner)
    stack.call.exact = exact
    held = [order for order in orders if order is not None]
    for name, order in zip(("gate_up_order", "down_order"), held, strict=True):
        if order.numel():
            setattr(stack.call, name, order.data_ptr())
    data = [tensor for each in (*gate_up, *down) for tensor in each.data] + held
    if biases is not None:
        biases = Biases(biases.gate_up_E2F.float().contiguous(), biases.down_ED.float().contiguous())
        stack.call.gate_up_bias, stack.call.down_bias = biases.gate_up_E2F.data_ptr(), biases.down_ED.data_ptr()
        data += [biases.gate_up_E2F, biases.down_ED]
    used = tuple(order for order in held if order.numel())
    return PackedExperts(tuple(data), sys.modules[__name__], _Grouped(stack, gate_up, down, used, biases))


def expert_tensors(experts: PackedExperts) -> list[list[Tensor]]:
    held: _Grouped = experts.handle
    found = [[*first.data, *second.data] for first, second in zip(held.gate_up, held.down, strict=True)]
    for order in held.orders:
        found = [[*each, row] for each, row in zip(found, order, strict=True)]
    return with_biases(found, held.biases)


def _alike(weights: Sequence[PackedWeight]) -> bool:
    """Whether all are packed for the compiled kernels, in one number of columns."""
    return all(each.address and each.handle.cols == weights[0].handle.cols for each in weights)


def _stacked_orders(weights: Sequence[PackedWeight]) -> Tensor | None:
    """int64 [E, columns]: -1 where a column has no input. Empty: no weight has an order; None: some have."""
    orders = [each.order for each in weights]
    if all(order is None for order in orders):
        return torch.empty(0, dtype=torch.int64)
    rows = [order for order in orders if order is not None]
    if len(rows) < len(orders) or any(len(row) != len(rows[0]) for row in rows):
        return None
    stacked = torch.stack(rows)
    return torch.where(stacked >= weights[0].cols, -1, stacked).contiguous()


def packed_experts(
    x_TD: Tensor,
    experts: PackedExperts,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
    clamp: ClampedGate | None = None,
) -> Tensor:
    stack: Stack = experts.handle.stack
    if clamp is not None:
        return stack.run(x_TD, topk_weights_Tk, topk_ids_Tk, activation=CLAMPED, alpha=clamp.alpha, limit=clamp.limit)
    return stack.run(x_TD, topk_weights_Tk, topk_ids_Tk, activation=ACTIVATIONS[activation])
