# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Packed experts on a GPU: tokens are sorted by expert as in `moe.triton`, then two grouped products decode weights as
they stream. On Hopper, few tokens go through `hopper`, more through `tiles_hopper`, many of e4m3 with a scale per row
through `moe.grouped_hopper`, many of e4m3 in blocks through `blocks_hopper`, and many of other codes through `unpacked`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.kernels.activation import gelu_tanh_mul, silu_mul
from bough.kernels.activation.triton import gated
from bough.kernels.launching import cdiv, pdl_options, power_of_two, trigger, wait
from bough.kernels.moe import Biases, clamped_gate, grouped_hopper
from bough.kernels.moe.triton import Sorted, combine_kernel, sort_pairs
from bough.kernels.packed_linear import Codes, PackedWeight
from bough.kernels.packed_linear.codes import Inputs, activation_order, can_stack, stack
from bough.kernels.packed_linear.decode import DeviceCodes, add_product, last_scale, lay_out, stack_laid_out
from bough.kernels.packed_linear.gguf_triton import DeviceBlocks, add_blocks, stack_blocks
from bough.kernels.packed_moe import PackedExperts, blocks_hopper, hopper, tiles_hopper, unpacked
from bough.kernels.packed_moe.reference import with_biases

_GATES = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


@dataclass(frozen=True, slots=True)
class _Stacks:
    """All experts' weights, one below the other."""

    gate_up: DeviceCodes | DeviceBlocks
    down: DeviceCodes | DeviceBlocks
    num_experts: int
    hopper: grouped_hopper.Weights | None
    """The same memory, where `grouped_hopper` takes it."""
    biases: Biases | None = None
    orders: tuple[Tensor | None, Tensor | None] = (None, None)
    """int64 [E, columns] of each: the activation that a column of an expert multiplies, or the width: none."""
    inputs: Inputs | None = None
    """How activations may be rounded; None: not at all."""


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


@triton.jit
def _block_experts_kernel(
    x, low, high, scales, minima, blocks, minima_of_blocks, out, block_expert, pairs,
    P, rows, depth, cols, width, x_stride, num_blocks, E,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMA: tl.constexpr, TWO_LEVELS: tl.constexpr,
    SORTED: tl.constexpr, PER_TOKEN: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_packed_experts_kernel` of GGUF's blocks."""
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
        result = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for k in tl.range(0, cols, 64):
            result = add_blocks(
                result, x, source, real, depth, x_stride, low, high, scales, minima, blocks, minima_of_blocks,
                width, row, inside, k, cols, BITS, GROUP, OFFSET, MINIMA, TWO_LEVELS, PRECISION,
            )  # fmt: skip
            if GATED:
                up = add_blocks(
                    up, x, source, real, depth, x_stride, low, high, scales, minima, blocks, minima_of_blocks,
                    width, row + rows, inside, k, cols, BITS, GROUP, OFFSET, MINIMA, TWO_LEVELS, PRECISION,
                )  # fmt: skip
        if GATED:
            DTYPE: tl.constexpr = out.dtype.element_ty
            result = gated(result.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), GELU)
        out_at = out + pair.to(tl.int64)[None, :] * rows + n[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=real[None, :] & inside[:, None])


def pack_experts(gate_up: Sequence[Codes], down: Sequence[Codes], biases: Biases | None = None) -> PackedExperts | None:
    first, second = _stacked(gate_up), _stacked(down)
    if first is None or second is None:
        return None
    orders = _orders(gate_up), _orders(down)
    plain = biases is None and orders == (None, None)
    hopper = _for_hopper(first, second, gate_up, len(gate_up)) if plain else None
    asked = {codes.inputs for codes in (*gate_up, *down)}
    inputs = asked.pop() if plain and len(asked) == 1 else None
    held = _Stacks(first, second, len(gate_up), hopper, biases, orders, inputs)
    more = (
        *(each for each in orders if each is not None),
        *(() if biases is None else (biases.gate_up_E2F, biases.down_ED)),
    )
    return PackedExperts((*first.tensors, *second.tensors, *more), sys.modules[__name__], held)


def group_experts(
    gate_up: Sequence[PackedWeight],
    down: Sequence[PackedWeight],
    biases: Biases | None = None,
    *,
    exact: bool = False,
) -> PackedExperts | None:
    """None where they are not all packed alike for the kernels here. They never round activations."""
    first, second = (_together([weight.handle for weight in many]) for many in (gate_up, down))
    if first is None or second is None or any(weight.order is not None for weight in (*gate_up, *down)):
        return None
    more = () if biases is None else (biases.gate_up_E2F, biases.down_ED)
    held = _Stacks(first, second, len(gate_up), None, biases)
    return PackedExperts((*first.tensors, *second.tensors, *more), sys.modules[__name__], held)


def _together(handles: Sequence[Any]) -> DeviceCodes | DeviceBlocks | None:
    blocks = [each for each in handles if isinstance(each, DeviceBlocks)]
    codes = [each for each in handles if isinstance(each, DeviceCodes)]
    if len(blocks) == len(handles):
        return stack_blocks(blocks)
    return stack_laid_out(codes) if len(codes) == len(handles) else None


def expert_tensors(experts: PackedExperts) -> list[list[Tensor]]:
    held: _Stacks = experts.handle
    found: list[list[Tensor]] = [[] for _ in range(held.num_experts)]
    for stacked in (held.gate_up, held.down):
        by_row, by_column = stacked.by_row, stacked.by_column  # [groups, rows of all experts]
        pieces = [each.chunk(held.num_experts, 0) for each in by_row]
        pieces += [each.chunk(held.num_experts, 1) for each in by_column]
        for expert, parts in enumerate(zip(*pieces, strict=True)):
            found[expert] += parts
    for order in held.orders:
        if order is not None:
            found = [[*each, row] for each, row in zip(found, order, strict=True)]
    if held.hopper is not None:
        scales = held.hopper.gate_up_scale_E2F, held.hopper.down_scale_ED
        for expert, parts in enumerate(zip(*(each for each in scales if each is not None), strict=True)):
            found[expert] += parts
    return with_biases(found, held.biases)


def _stacked(parts: Sequence[Codes]) -> DeviceCodes | None:
    """All experts' weights as one, each with columns in its own order; None if they differ in more than that."""
    plain = [replace(part, inputs=None, order_D=None) for part in parts]
    ordered = [part.order_D is not None for part in parts]
    if any(ordered) != all(ordered) or any(not can_stack(plain[0], each) for each in plain):
        return None
    return lay_out(stack(plain))


def _orders(parts: Sequence[Codes]) -> Tensor | None:
    orders = [activation_order(part) for part in parts]
    given = [order for order in orders if order is not None]
    return torch.stack(given) if given else None


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
    x_TD: Tensor,
    experts: PackedExperts,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
    clamp: ClampedGate | None = None,
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
    if clamp is None and blocks_hopper.suits(
        x, held.gate_up, held.down, held.num_experts, pairs, activation, held.inputs
    ):
        assert held.inputs is not None
        stacks = cast(DeviceCodes, held.gate_up), cast(DeviceCodes, held.down)
        blocks_hopper.experts(x, *stacks, held.num_experts, held.inputs, weights, ids, out)
        return out
    if _takes_tiles(x, held, pairs, activation, clamp):
        parts = _by_tiles(x, held, ids, clamp)
        _combine(parts, weights, ids, out, held.num_experts)
        return out
    if _takes_hopper(x, held, pairs, activation, clamp):
        parts = _by_hopper(x, held, ids, clamp)
        _combine(parts, weights, ids, out, held.num_experts)
        return out
    plain = held.orders == (None, None) and (held.biases is None) == (clamp is None)
    if plain and unpacked.suits(x, held.gate_up, held.down, held.num_experts, pairs, activation):
        stacks = cast(DeviceCodes, held.gate_up), cast(DeviceCodes, held.down)
        unpacked.experts(x, *stacks, held.num_experts, held.biases, clamp, weights, ids, out)
        return out
    shape = _shape_for(pairs, held.num_experts)
    order = _sorted(ids, held.num_experts, shape.block_t)
    parts = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    if clamp is None and held.orders == (None, None):
        inner = held.gate_up.num_rows // held.num_experts // 2
        hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
        _product(x, held.gate_up, hidden, order, shape, per_token=per_token, act=activation)
        _product(hidden, held.down, parts, order, shape, per_token=1, act=None)
    else:
        _apart(x, held, ids, order, shape, parts, activation, clamp)
    _combine(parts, weights, ids, out, held.num_experts)
    return out


def _sorted(ids: Tensor, num_experts: int, block_t: int) -> Sorted:
    """Pairs by expert, in blocks. A lone token needs no sorting: its experts are different ones, and each is a block."""
    if len(ids) > 1:
        return sort_pairs(ids, num_experts, block_t)
    return Sorted(ids, ids, ids.numel(), num_experts, is_sorted=False)


def _combine(parts: Tensor, weights: Tensor, ids: Tensor, out: Tensor, num_experts: int) -> None:
    """Fills out [T, D] with the weighted sums of each token's `parts`."""
    (tokens, width), per_token = out.shape, ids.shape[1]
    block = min(1024, power_of_two(width))
    combine_kernel[(tokens, cdiv(width, block))](
        parts, weights, ids, out, width, num_experts, PER_TOKEN=per_token, BLOCK=block, **pdl_options(out.device)
    )


def _is_plain(x: Tensor, held: _Stacks, clamp: ClampedGate | None) -> bool:
    """Whether experts have nothing that the kernels for Hopper don't know."""
    if held.orders != (None, None) or (held.biases is None) != (clamp is None):
        return False
    biases = () if held.biases is None else (held.biases.gate_up_E2F, held.biases.down_ED)
    return all(bias.dtype == x.dtype and bias.is_contiguous() for bias in biases)


def _takes_hopper(x: Tensor, held: _Stacks, pairs: int, activation: str, clamp: ClampedGate | None) -> bool:
    if not _is_plain(x, held, clamp):
        return False
    return hopper.suits(x, held.gate_up, held.down, held.num_experts, pairs, activation)


def _takes_tiles(x: Tensor, held: _Stacks, pairs: int, activation: str, clamp: ClampedGate | None) -> bool:
    if not _is_plain(x, held, clamp):
        return False
    has_bias = held.biases is not None
    stacks = held.gate_up, held.down
    return tiles_hopper.suits(x, *stacks, held.num_experts, pairs, activation, clamp, has_bias=has_bias)


def _by_tiles(x: Tensor, held: _Stacks, ids: Tensor, clamp: ClampedGate | None) -> Tensor:
    """parts [pairs, D]. Needs `_takes_tiles`."""
    assert isinstance(held.gate_up, DeviceCodes)
    assert isinstance(held.down, DeviceCodes)
    per_token, pairs = ids.shape[1], ids.numel()
    tile = tiles_hopper.tile_for(held.gate_up.kind, pairs, held.num_experts)
    assert tile is not None
    order = sort_pairs(ids.to(torch.int32), held.num_experts, tile.tokens)
    up_bias, down_bias = (None, None) if held.biases is None else (held.biases.gate_up_E2F, held.biases.down_ED)
    hidden = x.new_empty(pairs, held.gate_up.num_rows // held.num_experts // 2)
    tiles_hopper.product(
        x, held.gate_up, hidden, order, tile=tile, per_token=per_token, halves=2, bias=up_bias, clamp=clamp
    )
    parts = x.new_empty(pairs, x.shape[1])
    tiles_hopper.product(hidden, held.down, parts, order, tile=tile, per_token=1, halves=1, bias=down_bias)
    return parts


def _by_hopper(x: Tensor, held: _Stacks, ids: Tensor, clamp: ClampedGate | None) -> Tensor:
    """[pairs, D]: what each pair adds, not yet weighed."""
    assert isinstance(held.gate_up, DeviceCodes)
    assert isinstance(held.down, DeviceCodes)
    per_token, pairs = ids.shape[1], ids.numel()
    ids = ids.to(torch.int32)
    block_t = hopper.block_tokens(held.gate_up.kind, pairs, held.num_experts)
    order = _sorted(ids, held.num_experts, block_t)
    up_bias, down_bias = (None, None) if held.biases is None else (held.biases.gate_up_E2F, held.biases.down_ED)
    hidden = x.new_empty(pairs, held.gate_up.num_rows // held.num_experts // 2)
    hopper.product(
        x, held.gate_up, hidden, order, block_t=block_t, per_token=per_token, halves=2, bias=up_bias, clamp=clamp
    )
    parts = x.new_empty(pairs, x.shape[1])
    hopper.product(hidden, held.down, parts, order, block_t=block_t, per_token=1, halves=1, bias=down_bias)
    return parts


def _apart(
    x: Tensor,
    held: _Stacks,
    ids: Tensor,
    order: Sorted,
    shape: _Shape,
    parts: Tensor,
    activation: str,
    clamp: ClampedGate | None,
) -> None:
    """Fills parts [pairs, D]. Orders, biases and gates around the grouped products are torch's: a few passes over
    activations, which are small beside the weights that a step reads."""
    per_token = ids.shape[1]
    here = ids.flatten().long().clamp(0, held.num_experts - 1)  # of experts elsewhere nothing is summed
    first, second = held.orders
    if first is not None:
        x, per_token = _in_order(x.repeat_interleave(per_token, 0), first[here]), 1
    raw = torch.zeros((parts.shape[0], held.gate_up.num_rows // held.num_experts), dtype=x.dtype, device=x.device)
    _product(x, held.gate_up, raw, order, shape, per_token=per_token, act=None)
    if held.biases is not None:
        raw += held.biases.gate_up_E2F[here]
    hidden = _GATES[activation](raw) if clamp is None else clamped_gate(raw, clamp.alpha, clamp.limit)
    if second is not None:
        hidden = _in_order(hidden, second[here])
    parts.zero_()  # rows of experts elsewhere are not written
    _product(hidden, held.down, parts, order, shape, per_token=1, act=None)
    if held.biases is not None:
        parts += held.biases.down_ED[here]


def _in_order(x_PD: Tensor, order_PC: Tensor) -> Tensor:
    """Each row in an order of its own; what is not there is zero."""
    return torch.nn.functional.pad(x_PD, (0, 1)).gather(1, order_PC)


def _product(
    x: Tensor,
    weight: DeviceCodes | DeviceBlocks,
    out: Tensor,
    order: Sorted,
    shape: _Shape,
    *,
    per_token: int,
    act: str | None,
) -> None:
    """Fills out [pairs, rows]; `act` set: rows are half the weight's."""
    rows = out.shape[1]
    blocks = isinstance(weight, DeviceBlocks)
    kernel = _block_experts_kernel if blocks else _packed_experts_kernel
    kernel[(order.num_blocks * cdiv(rows, shape.block_n),)](
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
