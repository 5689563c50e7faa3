# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Packed experts on a GPU: tokens are sorted by expert as in `moe.triton`, then two grouped products decode weights as
they stream. On Hopper, many tokens of e4m3 with a scale per row go through `moe.grouped_hopper`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.activation.triton import gated
from bough.kernels.launching import cdiv, pdl_options, power_of_two, trigger, wait
from bough.kernels.moe import grouped_hopper
from bough.kernels.moe.triton import Sorted, combine_kernel, sort_pairs
from bough.kernels.packed_linear import Codes
from bough.kernels.packed_linear.codes import can_stack, stack
from bough.kernels.packed_linear.decode import DeviceCodes, add_product, last_scale, lay_out
from bough.kernels.packed_moe import PackedExperts


@dataclass(frozen=True, slots=True)
class _Stacks:
    """All experts' weights, one below the other."""

    gate_up: DeviceCodes
    down: DeviceCodes
    num_experts: int
    hopper: grouped_hopper.Weights | None
    """The same memory, where `grouped_hopper` takes it."""


@triton.jit
def _packed_experts_kernel(
    x,
    codes,
    scales,
    zeros,
    row_scales,
    table,
    out,
    block_expert,
    pairs,
    P,
    rows,
    depth,
    cols,
    width,
    x_stride,
    num_blocks,
    E,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SORTED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = x[pair // PER_TOKEN] @ weight[expert].T, with the activation over its halves if GATED.

    The weight is seen as [experts * (2 *) rows, D]. Not SORTED: block b is pair b.
    """
    block = tl.program_id(0) % num_blocks
    tile = tl.program_id(0) // num_blocks
    trigger(PDL)
    wait(PDL)
    expert = tl.load(block_expert + block)
    if (expert >= 0) & (expert < E):
        if SORTED:
            pair = tl.load(pairs + block * BLOCK_T + tl.arange(0, BLOCK_T))
        else:
            pair = tl.where(tl.arange(0, BLOCK_T) == 0, block, P)
        real = pair < P
        source = (pair // PER_TOKEN).to(tl.int64)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < rows
        HALVES: tl.constexpr = 2 if GATED else 1
        row = expert.to(tl.int64) * (HALVES * rows) + n
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for k in tl.range(0, cols, BLOCK_K):
            acc = add_product(
                acc, x, source, real, depth, x_stride, codes, scales, zeros, table, width, row, inside,
                k, cols, KIND, ZERO, GROUP, SCALE_ROWS, NATIVE, PTX, PRECISION, BLOCK_K,
            )  # fmt: skip
            if GATED:
                up = add_product(
                    up, x, source, real, depth, x_stride, codes, scales, zeros, table, width, row + rows, inside,
                    k, cols, KIND, ZERO, GROUP, SCALE_ROWS, NATIVE, PTX, PRECISION, BLOCK_K,
                )  # fmt: skip
        result = last_scale(acc, scales, row_scales, row, inside, GROUP, ROW_SCALE, SCALE_ROWS)
        if GATED:
            DTYPE: tl.constexpr = out.dtype.element_ty
            up = last_scale(up, scales, row_scales, row + rows, inside, GROUP, ROW_SCALE, SCALE_ROWS)
            result = gated(result.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), GELU)
        out_at = out + pair.to(tl.int64)[None, :] * rows + n[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=real[None, :] & inside[:, None])


def pack_experts(gate_up: Sequence[Codes], down: Sequence[Codes]) -> PackedExperts | None:
    first, second = _stacked(gate_up), _stacked(down)
    if first is None or second is None:
        return None
    held = _Stacks(first, second, len(gate_up), _for_hopper(first, second, gate_up, len(gate_up)))
    return PackedExperts((*first.tensors, *second.tensors), sys.modules[__name__], held)


def expert_tensors(experts: PackedExperts) -> list[list[Tensor]]:
    held: _Stacks = experts.handle
    found: list[list[Tensor]] = [[] for _ in range(held.num_experts)]
    for stacked in (held.gate_up, held.down):
        by_row = [each for each in (stacked.codes, stacked.row_scales) if each is not None]
        by_column = [
            each for each in (stacked.scales, stacked.zeros) if each is not None
        ]  # [groups, rows of all experts]
        pieces = [each.chunk(held.num_experts, 0) for each in by_row]
        pieces += [each.chunk(held.num_experts, 1) for each in by_column]
        for expert, parts in enumerate(zip(*pieces, strict=True)):
            found[expert] += parts
    if held.hopper is not None:
        scales = held.hopper.gate_up_scale_E2F, held.hopper.down_scale_ED
        for expert, parts in enumerate(zip(*(each for each in scales if each is not None), strict=True)):
            found[expert] += parts
    return found


def _stacked(parts: Sequence[Codes]) -> DeviceCodes | None:
    """All experts' weights as one; None if they differ, or if activations would have to be put in another order."""
    first = replace(parts[0], inputs=None)
    if any(part.order_D is not None or not can_stack(first, replace(part, inputs=None)) for part in parts):
        return None
    return lay_out(stack([replace(part, inputs=None) for part in parts]))


def _for_hopper(
    gate_up: DeviceCodes, down: DeviceCodes, codes: Sequence[Codes], num_experts: int
) -> grouped_hopper.Weights | None:
    asked = codes[0].inputs
    if asked is None or asked.kind != "float8" or any(each.kind != "float8" or each.group for each in (gate_up, down)):
        return None
    if any(each.row_scales is not None for each in (gate_up, down)):
        return None
    stacks = [each.codes.view(torch.float8_e4m3fn).view(num_experts, -1, each.cols) for each in (gate_up, down)]
    scales = [each.scales.float().view(num_experts, -1) for each in (gate_up, down)]
    weights = grouped_hopper.Weights(*stacks, *scales)
    return weights if grouped_hopper.can_serve(weights) else None


@dataclass(frozen=True, slots=True)
class _Shape:
    block_t: int
    block_n: int
    num_warps: int
    num_stages: int


def _shape_for(num_pairs: int, num_experts: int) -> _Shape:
    """Few pairs: narrow tiles, so that enough programs read weights. Many: tiles that feed the tensor cores."""
    per_expert = num_pairs / num_experts
    if num_pairs <= 16:
        return _Shape(16, 16, 4, 4)
    if per_expert <= 12:
        return _Shape(16, 64, 4, 4)
    if per_expert <= 48:
        return _Shape(32, 64, 4, 3)
    return _Shape(64, 64, 4, 3)


def packed_experts(
    x_TD: Tensor, experts: PackedExperts, topk_weights_Tk: Tensor, topk_ids_Tk: Tensor, activation: str = "silu"
) -> Tensor:
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"no activation {activation!r} for experts: silu and gelu_tanh are")
    held: _Stacks = experts.handle
    tokens, per_token = topk_ids_Tk.shape
    out = torch.empty_like(x_TD)
    if tokens == 0:
        return out
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    ids, weights = topk_ids_Tk.contiguous(), topk_weights_Tk.contiguous()
    if held.hopper is not None and grouped_hopper.suits(x, held.hopper, ids, activation):
        grouped_hopper.experts(x, held.hopper, weights, ids, out)
        return out
    width, pairs = x.shape[1], tokens * per_token
    shape = _shape_for(pairs, held.num_experts)
    order = (
        sort_pairs(ids, held.num_experts, shape.block_t)
        if tokens > 1
        else Sorted(ids, ids, pairs, held.num_experts, is_sorted=False)
    )
    inner = held.gate_up.codes.shape[0] // held.num_experts // 2
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    _product(x, held.gate_up, hidden, order, shape, per_token=per_token, act=activation)
    parts = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    _product(hidden, held.down, parts, order, shape, per_token=1, act=None)
    block = min(1024, power_of_two(width))
    combine_kernel[(tokens, cdiv(width, block))](
        parts, weights, ids, out, width, held.num_experts, PER_TOKEN=per_token, BLOCK=block, **pdl_options(x.device)
    )
    return out


def _product(
    x: Tensor, weight: DeviceCodes, out: Tensor, order: Sorted, shape: _Shape, *, per_token: int, act: str | None
) -> None:
    """Fills out [pairs, rows]; `act` set: rows are half the weight's."""
    rows = out.shape[1]
    _packed_experts_kernel[(order.num_blocks * cdiv(rows, shape.block_n),)](
        x,
        *weight.arguments(),
        out,
        order.block_expert,
        order.pairs,
        out.shape[0],
        rows,
        x.shape[1],
        weight.cols,
        weight.scales.shape[1],
        x.stride(0),
        order.num_blocks,
        order.num_experts,
        **weight.constants(),
        SORTED=order.is_sorted,
        PER_TOKEN=per_token,
        GATED=act is not None,
        GELU=act == "gelu_tanh",
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_T=shape.block_t,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **pdl_options(x.device),
    )
