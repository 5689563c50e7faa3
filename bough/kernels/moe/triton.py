# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Mixture of experts on the GPU: tokens are sorted by expert on the device, then two grouped matrix products run over
blocks of one expert's tokens. Grids are upper bounds; programs without a block end at once, so nothing waits for counts.
A lone token needs no sorting: its experts are different ones, and each is a block. On Hopper, `lone_hopper` serves the few,
and `grouped_hopper` the many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.activation.triton import gated
from bough.kernels.choices import facts_of
from bough.kernels.launching import cdiv, pdl_options, power_of_two, trigger, wait
from bough.kernels.linear.skinny import weight_tile
from bough.kernels.linear.triton import linear
from bough.kernels.moe import (
    Biases,
    Choosing,
    Routing,
    Scoring,
    clamped_gate,
    grouped_hopper,
    lone_hopper,
    reference,
    routing as choosing,
)

_ONE_LAUNCH_PAIRS = 4096
"""Up to here one launch sorts all (token, expert) pairs."""


@triton.jit
def _sort_kernel(
    ids,
    block_expert,
    pairs,
    P,
    E,
    num_blocks,
    BLOCK_T: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program an expert: it counts the pairs of all of them, and so knows where its own go, in their order. Places of its
    blocks that no pair takes get P; blocks of no expert get -1."""
    trigger(PDL)
    wait(PDL)
    mine = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < E), expert, E)
    each = tl.arange(0, BINS)
    count = tl.histogram(expert, BINS)
    blocks = tl.where(each < E, (count + BLOCK_T - 1) // BLOCK_T, 0)
    first = tl.sum(tl.where(each < mine, blocks, 0), 0)
    own_count = tl.sum(tl.where(each == mine, count, 0), 0)
    own = (own_count + BLOCK_T - 1) // BLOCK_T
    is_mine = expert == mine
    rank = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    tl.store(pairs + first * BLOCK_T + rank, pair, mask=is_mine)
    free = own_count + tl.arange(0, BLOCK_T)
    tl.store(pairs + first * BLOCK_T + free, free * 0 + P, mask=free < own * BLOCK_T)
    AT_ONCE: tl.constexpr = 64
    for base in range(0, own, AT_ONCE):
        block = base + tl.arange(0, AT_ONCE)
        tl.store(block_expert + first + block, block * 0 + mine, mask=block < own)
    if mine == E - 1:
        for base in range(first + own, num_blocks, AT_ONCE):
            block = base + tl.arange(0, AT_ONCE)
            tl.store(block_expert + block, block * 0 - 1, mask=block < num_blocks)


@triton.jit
def _count_kernel(ids, counts, P, E, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    mine = (expert >= 0) & (expert < E)
    tl.atomic_add(counts + expert, 1, mask=mine, sem="relaxed")


@triton.jit
def _lay_out_kernel(counts, cursors, block_expert, E, num_blocks, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Turns counts into the place where each expert's pairs go, and names the expert of every block of places."""
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
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    mine = (expert >= 0) & (expert < E)
    place = tl.atomic_add(cursors + expert, 1, mask=mine, sem="relaxed")
    tl.store(pairs + place, pair, mask=mine)


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
def combine_kernel(parts, weights, ids, out, D, E, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
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


def topk_softmax(logits_TE: Tensor, k: int, renormalise: bool, loc_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return choosing.choose(logits_TE, Choosing(k, renormalise), loc_T)


def topk_scored(
    logits_TE: Tensor, k: int, scoring: Scoring, bias_E: Tensor | None = None, loc_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return choosing.choose(logits_TE, Choosing(k, scoring.renormalise, scoring, bias_E), loc_T)


def route(
    x_TD: Tensor, router_ED: Tensor, router_bias_E: Tensor | None, how: Choosing, loc_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if choosing.suits(x_TD, router_ED, how):
        return choosing.route(x_TD, router_ED, router_bias_E, how, loc_T)
    return choosing.choose(linear(x_TD.to(router_ED.dtype), router_ED, router_bias_E), how, loc_T)


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How the grouped products are cut: tokens and weight rows of a tile, step along the depth."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_LEAST_TILES = 128
"""Of a product: about as many as multiprocessors."""


def shape_for(num_pairs: int, num_experts: int, rows: int) -> ExpertTiling:
    """Few pairs: narrow tiles, so that enough programs read weights. Many: tiles that feed the tensor cores. `rows`: of the
    narrower product.

    On an H200, us of a layer by tokens, weight rows and depth of a tile. 66 experts of 1408 units in a model of 2048, 8 a
    token, 2 of which all choose: 1 token 16 x 64 x 128 40.4, 16 x 32 x 256 44.3, 16 x 16 x 256 52.7; 4 tokens 102, 107, 135;
    100 tokens (12 pairs an expert) 16 x 64 x 128 285, 32 x 64 x 64 282, 32 x 64 x 128 290, 64 x 64 x 64 294; 200 tokens 376,
    294, 305, 302. 128 experts of 768 units, 16 pairs an expert: 328, 306, 310, 316. An expert whose tokens take two tiles
    costs more than a tile that is twice as high, so the height changes where a tenth of the experts would have two: tokens
    of an expert scatter by the root of their mean."""
    per_expert = num_pairs / num_experts
    if num_pairs * rows < _LEAST_TILES * 32:
        return ExpertTiling(16, 16, 256, 4, 4)
    if num_pairs * rows < _LEAST_TILES * 64:
        return ExpertTiling(16, 32, 256, 4, 3)
    if per_expert <= 12:
        return ExpertTiling(16, 64, 128, 4, 4)
    if per_expert <= 26:
        return ExpertTiling(32, 64, 64, 4, 5)
    if per_expert <= 128:
        return ExpertTiling(64, 64, 64, 4, 4)
    return ExpertTiling(128, 64, 64, 8, 4)


@dataclass(slots=True)
class Sorted:
    pairs: Tensor
    block_expert: Tensor
    num_blocks: int
    num_experts: int
    is_sorted: bool = True


def sort_pairs(ids: Tensor, num_experts: int, block_t: int) -> Sorted:
    num_pairs, device = ids.numel(), ids.device
    num_blocks = min(num_pairs, cdiv(num_pairs, block_t) + num_experts)
    block_expert = torch.empty(num_blocks, dtype=torch.int32, device=device)
    if num_pairs <= _ONE_LAUNCH_PAIRS:
        pairs = torch.empty(num_blocks * block_t, dtype=torch.int32, device=device)
        num_warps = 4 if num_pairs <= 1024 else 8
        _sort_kernel[(num_experts,)](
            ids,
            block_expert,
            pairs,
            num_pairs,
            num_experts,
            num_blocks,
            BLOCK_T=block_t,
            BINS=power_of_two(num_experts + 1),
            BLOCK=power_of_two(num_pairs, at_least=32 * num_warps),
            num_warps=num_warps,
            **pdl_options(device),
        )
        return Sorted(pairs, block_expert, num_blocks, num_experts)
    block_e = power_of_two(num_experts)
    pairs = torch.full((num_blocks * block_t,), num_pairs, dtype=torch.int32, device=device)
    counts, cursors = torch.zeros((2, num_experts), dtype=torch.int32, device=device)
    grid = (cdiv(num_pairs, 1024),)
    _count_kernel[grid](ids, counts, num_pairs, num_experts, BLOCK=1024)
    _lay_out_kernel[(num_blocks,)](
        counts, cursors, block_expert, num_experts, num_blocks, BLOCK_T=block_t, BLOCK_E=block_e
    )
    _place_kernel[grid](ids, cursors, pairs, num_pairs, num_experts, BLOCK=1024)
    return Sorted(pairs, block_expert, num_blocks, num_experts)


def _product(
    x: Tensor, weight_ERD: Tensor, out: Tensor, order: Sorted, shape: ExpertTiling, *, per_token: int, act: str | None
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


def _descriptor(weight: Tensor, shape: ExpertTiling) -> object:
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
    if len(x_TD) == 0:
        return x_TD.new_empty(0, down_EDF.shape[1])
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    if lone_hopper.suits(x, gate_up_E2FD, down_EDF, topk_ids_Tk, activation):
        out = x.new_empty(x.shape)
        lone_hopper.experts(x, gate_up_E2FD, down_EDF, topk_weights_Tk, topk_ids_Tk, out)
        return out
    many = grouped_hopper.Weights(gate_up_E2FD, down_EDF)
    if grouped_hopper.suits(x, many, topk_ids_Tk, activation):
        out = x.new_empty(x.shape)
        grouped_hopper.experts(x, many, topk_weights_Tk.contiguous(), topk_ids_Tk.contiguous(), out)
        return out
    return portable_experts(x, gate_up_E2FD, down_EDF, topk_weights_Tk, topk_ids_Tk, activation)


def portable_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
) -> Tensor:
    """As `fused_experts`, of at least one token whose values lie side by side, by kernels that run on any device."""
    tokens, per_token = topk_ids_Tk.shape
    experts, width, inner = down_EDF.shape
    out = torch.empty((tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    ids, weights = topk_ids_Tk.contiguous(), topk_weights_Tk.contiguous()
    pairs = tokens * per_token
    shape = shape_for(pairs, experts, min(inner, width))
    order = sort_pairs(ids, experts, shape.block_t) if tokens > 1 else Sorted(ids, ids, pairs, experts, is_sorted=False)
    hidden = torch.empty((pairs, inner), dtype=x_TD.dtype, device=x_TD.device)
    _product(x_TD, gate_up_E2FD, hidden, order, shape, per_token=per_token, act=activation)
    parts = torch.empty((pairs, width), dtype=x_TD.dtype, device=x_TD.device)
    _product(hidden, down_EDF, parts, order, shape, per_token=1, act=None)
    block = min(1024, power_of_two(width))
    combine_kernel[(tokens, cdiv(width, block))](
        parts, weights, ids, out, width, experts, PER_TOKEN=per_token, BLOCK=block, **pdl_options(x_TD.device)
    )
    return out


def plain_experts(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The activation between the grouped products is torch's."""
    tokens, per_token = topk_ids_Tk.shape
    experts, width, inner = down_EDF.shape
    out = torch.empty((tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    if tokens == 0:
        return out
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    ids, weights = topk_ids_Tk.contiguous(), topk_weights_Tk.contiguous()
    pairs = tokens * per_token
    shape = shape_for(pairs, experts, min(inner, width))
    order = sort_pairs(ids, experts, shape.block_t) if tokens > 1 else Sorted(ids, ids, pairs, experts, is_sorted=False)
    raw = torch.zeros((pairs, inner), dtype=x.dtype, device=x.device)
    _product(x, up_EFD, raw, order, shape, per_token=per_token, act=None)
    parts = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    _product(activation(raw), down_EDF, parts, order, shape, per_token=1, act=None)
    block = min(1024, power_of_two(width))
    combine_kernel[(tokens, cdiv(width, block))](
        parts, weights, ids, out, width, experts, PER_TOKEN=per_token, BLOCK=block, **pdl_options(x.device)
    )
    return out


def biased_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    biases: Biases,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Biases and gates between the grouped products are torch's: a few passes over activations, which are small beside the
    weights that a step reads."""
    tokens, per_token = topk_ids_Tk.shape
    experts, width, inner = down_EDF.shape
    out = torch.empty((tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    if tokens == 0:
        return out
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    ids, weights = topk_ids_Tk.contiguous(), topk_weights_Tk.contiguous()
    pairs = tokens * per_token
    shape = shape_for(pairs, experts, min(inner, width))
    order = sort_pairs(ids, experts, shape.block_t) if tokens > 1 else Sorted(ids, ids, pairs, experts, is_sorted=False)
    here = ids.flatten().long().clamp(0, experts - 1)  # of experts elsewhere nothing is summed
    raw = torch.zeros((pairs, 2 * inner), dtype=x.dtype, device=x.device)
    _product(x, gate_up_E2FD, raw, order, shape, per_token=per_token, act=None)
    hidden = clamped_gate(raw + biases.gate_up_E2F[here], alpha, limit)
    parts = torch.zeros((pairs, width), dtype=x.dtype, device=x.device)
    _product(hidden, down_EDF, parts, order, shape, per_token=1, act=None)
    parts += biases.down_ED[here]
    block = min(1024, power_of_two(width))
    combine_kernel[(tokens, cdiv(width, block))](
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
