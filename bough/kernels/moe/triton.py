# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Mixture of experts on the GPU: tokens are sorted by expert on the device, then two grouped matrix products run over
blocks of one expert's tokens. Grids are upper bounds; programs without a block end at once, so nothing waits for counts.
A lone token needs no sorting: its experts are different ones, and each is a block. On Hopper, `lone_hopper` serves the few.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.activation.triton import gated
from bough.kernels.choices import facts_of
from bough.kernels.launching import cdiv, pdl_options, power_of_two, trigger, wait
from bough.kernels.linear.skinny import weight_tile
from bough.kernels.moe import Routing, lone_hopper, reference

_ONE_PROGRAM_PAIRS = 4096
"""Up to here one program sorts all (token, expert) pairs."""


@triton.jit
def _topk_kernel(
    logits,
    weights,
    ids,
    stride,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_K)
    trigger(PDL)
    wait(PDL)
    value = tl.load(logits + token * stride + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    top = tl.max(value, 0)
    total = tl.sum(tl.exp(value - top), 0)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    left = tl.where(expert < E, value, float("-inf"))
    taken = expert >= E
    for place in tl.static_range(K):
        best = tl.max(left, 0)
        first = tl.min(tl.where((left == best) & (taken == 0), expert, BLOCK), 0)
        chosen = tl.where(choice == place, first, chosen)
        weight = tl.where(choice == place, tl.exp(best - top) / total, weight)
        taken = taken | (expert == first)
        left = tl.where(expert == first, float("-inf"), left)
    if RENORMALISE:
        weight = weight / tl.sum(weight, 0)
    tl.store(weights + token * K + choice, weight, mask=choice < K)
    tl.store(ids + token * K + choice, chosen, mask=choice < K)


@triton.jit
def _count(ids, counts, base, P, E, BLOCK: tl.constexpr):
    pair = base + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    mine = (expert >= 0) & (expert < E)
    tl.atomic_add(counts + expert, 1, mask=mine, sem="relaxed")


@triton.jit
def _lay_out(counts, cursors, block_expert, E, num_blocks, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Turns counts into the place where each expert's pairs go, and names the expert of every block of places."""
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(counts + expert, mask=expert < E, other=0, cache_modifier=".cg")
    blocks = (count + BLOCK_T - 1) // BLOCK_T
    end = tl.cumsum(blocks, 0)
    tl.store(cursors + expert, (end - blocks) * BLOCK_T, mask=expert < E)
    for block in range(num_blocks):
        owner = tl.sum((end <= block).to(tl.int32), 0)
        tl.store(block_expert + block, tl.where(owner < E, owner, -1))


@triton.jit
def _place(ids, cursors, pairs, base, P, E, BLOCK: tl.constexpr):
    pair = base + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    mine = (expert >= 0) & (expert < E)
    place = tl.atomic_add(cursors + expert, 1, mask=mine, sem="relaxed")
    tl.store(pairs + place, pair, mask=mine)


@triton.jit
def _sort_kernel(
    ids,
    counts,
    cursors,
    block_expert,
    pairs,
    P,
    E,
    num_blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of the sorting in one program. `pairs` holds P in every place that no pair takes."""
    trigger(PDL)
    wait(PDL)
    expert = tl.arange(0, BLOCK_E)
    tl.store(counts + expert, expert * 0, mask=expert < E)
    for base in range(0, num_blocks * BLOCK_T, BLOCK):
        place = base + tl.arange(0, BLOCK)
        tl.store(pairs + place, place * 0 + P, mask=place < num_blocks * BLOCK_T)
    tl.debug_barrier()
    for base in range(0, P, BLOCK):
        _count(ids, counts, base, P, E, BLOCK)
    tl.debug_barrier()
    _lay_out(counts, cursors, block_expert, E, num_blocks, BLOCK_T, BLOCK_E)
    tl.debug_barrier()
    for base in range(0, P, BLOCK):
        _place(ids, cursors, pairs, base, P, E, BLOCK)


@triton.jit
def _count_kernel(ids, counts, P, E, BLOCK: tl.constexpr):
    _count(ids, counts, tl.program_id(0) * BLOCK, P, E, BLOCK)


@triton.jit
def _lay_out_kernel(counts, cursors, block_expert, E, num_blocks, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(counts + expert, mask=expert < E, other=0)
    blocks = (count + BLOCK_T - 1) // BLOCK_T
    end = tl.cumsum(blocks, 0)
    block = tl.program_id(0)
    if block == 0:
        tl.store(cursors + expert, (end - blocks) * BLOCK_T, mask=expert < E)
    owner = tl.sum((end <= block).to(tl.int32), 0)
    tl.store(block_expert + block, tl.where(owner < E, owner, -1))


@triton.jit
def _place_kernel(ids, cursors, pairs, P, E, BLOCK: tl.constexpr):
    _place(ids, cursors, pairs, tl.program_id(0) * BLOCK, P, E, BLOCK)


@triton.jit
def _experts_kernel(
    x,
    weight,
    out,
    block_expert,
    pairs,
    P,
    rows,
    D,
    x_stride,
    weight_stride,
    num_blocks,
    E,
    SORTED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = x[pair // PER_TOKEN] @ weight[expert].T, with the activation over its halves if GATED.

    `weight` is seen as [experts * (2 *) rows, D]. Not SORTED: block b is pair b.
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
        first = tile * BLOCK_N
        HALVES: tl.constexpr = 2 if GATED else 1
        base = expert * (HALVES * rows)
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            col = k + tl.arange(0, BLOCK_K)
            w = weight_tile(
                weight, base + first, k, D, base + rows, weight_stride, BLOCK_N, BLOCK_K, EVEN, TMA
            )  # fmt: skip
            x_at = x + source[None, :] * x_stride + col[:, None]
            if EVEN:
                x_tile = tl.load(x_at, mask=real[None, :], other=0.0)
            else:
                x_tile = tl.load(x_at, mask=real[None, :] & (col < D)[:, None], other=0.0)
            acc = tl.dot(w, x_tile, acc, input_precision=PRECISION)
            if GATED:
                w_up = weight_tile(
                    weight, base + rows + first, k, D, base + 2 * rows, weight_stride, BLOCK_N, BLOCK_K, EVEN, TMA
                )  # fmt: skip
                up = tl.dot(w_up, x_tile, up, input_precision=PRECISION)
        n = first + tl.arange(0, BLOCK_N)
        result = acc
        if GATED:
            DTYPE: tl.constexpr = out.dtype.element_ty
            result = gated(acc.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), GELU)
        out_at = out + pair.to(tl.int64)[None, :] * rows + n[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=real[None, :] & (n < rows)[:, None])


@triton.jit
def _combine_kernel(parts, weights, ids, out, D, E, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    trigger(PDL)
    wait(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + choice
        expert = tl.load(ids + pair).to(tl.int32) + tl.zeros([BLOCK], tl.int32)
        mine = inside & (expert >= 0) & (expert < E)
        part = tl.load(parts + pair * D + col, mask=mine, other=0.0).to(tl.float32)
        acc += part * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * D + col, acc.to(out.dtype.element_ty), mask=inside)


def topk_softmax(logits_TE: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    tokens, experts = logits_TE.shape
    logits = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    if tokens:
        _topk_kernel[(tokens,)](
            logits,
            weights,
            ids,
            logits.stride(0),
            E=experts,
            K=k,
            RENORMALISE=renormalise,
            BLOCK=power_of_two(experts),
            BLOCK_K=power_of_two(k),
            num_warps=1 if experts <= 256 else 4,
            **pdl_options(logits.device),
        )
    return weights, ids


@dataclass(frozen=True, slots=True)
class Shape:
    """How the grouped products are cut: tokens and weight rows of a tile, step along the depth."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def shape_for(num_pairs: int, num_experts: int) -> Shape:
    """Few pairs: narrow tiles, so that enough programs read weights. Many: tiles that feed the tensor cores."""
    per_expert = num_pairs / num_experts
    if num_pairs <= 16:
        return Shape(16, 16, 256, 4, 4)
    if num_pairs <= 32:
        return Shape(16, 32, 256, 4, 3)
    if per_expert <= 12:
        return Shape(16, 64, 128, 4, 4)
    if per_expert <= 48:
        return Shape(32, 64, 128, 4, 3)
    if per_expert <= 128:
        return Shape(64, 64, 64, 4, 4)
    return Shape(128, 64, 64, 8, 4)


@dataclass(slots=True)
class _Sorted:
    pairs: Tensor
    block_expert: Tensor
    num_blocks: int
    num_experts: int
    is_sorted: bool = True


def _sort(ids: Tensor, num_experts: int, block_t: int) -> _Sorted:
    num_pairs, device = ids.numel(), ids.device
    num_blocks = min(num_pairs, cdiv(num_pairs, block_t) + num_experts)
    block_expert = torch.empty(num_blocks, dtype=torch.int32, device=device)
    block_e = power_of_two(num_experts)
    if num_pairs <= _ONE_PROGRAM_PAIRS:
        pairs = torch.empty(num_blocks * block_t, dtype=torch.int32, device=device)
        counts, cursors = torch.empty((2, num_experts), dtype=torch.int32, device=device)
        _sort_kernel[(1,)](
            ids,
            counts,
            cursors,
            block_expert,
            pairs,
            num_pairs,
            num_experts,
            num_blocks,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            BLOCK=min(1024, power_of_two(num_pairs)),
            num_warps=8,
            **pdl_options(device),
        )
        return _Sorted(pairs, block_expert, num_blocks, num_experts)
    pairs = torch.full((num_blocks * block_t,), num_pairs, dtype=torch.int32, device=device)
    counts, cursors = torch.zeros((2, num_experts), dtype=torch.int32, device=device)
    grid = (cdiv(num_pairs, 1024),)
    _count_kernel[grid](ids, counts, num_pairs, num_experts, BLOCK=1024)
    _lay_out_kernel[(num_blocks,)](
        counts, cursors, block_expert, num_experts, num_blocks, BLOCK_T=block_t, BLOCK_E=block_e
    )
    _place_kernel[grid](ids, cursors, pairs, num_pairs, num_experts, BLOCK=1024)
    return _Sorted(pairs, block_expert, num_blocks, num_experts)


def _product(
    x: Tensor, weight_ERD: Tensor, out: Tensor, order: _Sorted, shape: Shape, *, per_token: int, act: str | None
) -> None:
    """Fills out [pairs, rows]; `act` set: rows are half the weight's."""
    flat = weight_ERD.flatten(0, 1)
    rows, depth = out.shape[1], x.shape[1]
    even = rows % shape.block_n == 0 and depth % shape.block_k == 0
    tma = even and facts_of(x.device.type, x.device.index).capability >= (9, 0) and torch.version.hip is None
    _experts_kernel[(order.num_blocks * cdiv(rows, shape.block_n),)](
        x,
        _descriptor(flat, shape) if tma else flat,
        out,
        order.block_expert,
        order.pairs,
        out.shape[0],
        rows,
        depth,
        x.stride(0),
        flat.stride(0),
        order.num_blocks,
        order.num_experts,
        SORTED=order.is_sorted,
        PER_TOKEN=per_token,
        GATED=act is not None,
        GELU=act == "gelu_tanh",
        EVEN=even,
        TMA=tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_T=shape.block_t,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **pdl_options(x.device),
    )


def _descriptor(weight: Tensor, shape: Shape) -> object:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight, [shape.block_n, shape.block_k])


def fused_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
) -> Tensor:
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"no activation {activation!r} for experts: silu and gelu_tanh are")
    tokens, per_token = topk_ids_Tk.shape
    experts, width, inner = down_EDF.shape
    out = torch.empty((tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    if tokens == 0:
        return out
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    if lone_hopper.suits(x, gate_up_E2FD, down_EDF, topk_ids_Tk, activation):
        lone_hopper.experts(x, gate_up_E2FD, down_EDF, topk_weights_Tk, topk_ids_Tk, out)
        return out
    ids, weights = topk_ids_Tk.contiguous(), topk_weights_Tk.contiguous()
    pairs = tokens * per_token
    shape = shape_for(pairs, experts)
    order = _sort(ids, experts, shape.block_t) if tokens > 1 else _Sorted(ids, ids, pairs, experts, is_sorted=False)
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    _product(x, gate_up_E2FD, hidden, order, shape, per_token=per_token, act=activation)
    parts = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    _product(hidden, down_EDF, parts, order, shape, per_token=1, act=None)
    block = min(1024, power_of_two(width))
    _combine_kernel[(tokens, cdiv(width, block))](
        parts, weights, ids, out, width, experts, PER_TOKEN=per_token, BLOCK=block, **pdl_options(x.device)
    )
    return out


def routed_experts(
    x_TD: Tensor,
    residual_TD: Tensor,
    routing: Routing,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    given = (x_TD, residual_TD, routing, gate_up_E2FD, down_EDF)
    if not lone_hopper.suits_routed(*given, activation):
        return reference.routed_experts(*given, activation)
    out, total = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    lone_hopper.routed_experts(*given, out, total)
    return out, total
