# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Which experts tokens get, on the GPU: from logits, or for few tokens from what the router reads, in one launch either way.

The router's product of few tokens is cut by experts, that of more by tokens, experts and depth for the tensor cores; the
program of some tokens that ends last chooses for them. T tokens, E experts, k of them a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, power_of_two, trigger, wait
from bough.kernels.linear.skinny import SCRATCH
from bough.kernels.moe import Choosing, reference

FEW_TOKENS = 32
"""Whose router takes one launch without the tensor cores."""
MANY_TOKENS = {torch.float32: range(17, 513), torch.bfloat16: range(33, 65), torch.float16: range(33, 65)}
"""By type of the router: those whose product is one of the tensor cores, in the same launch.

Microseconds on an H200, in this launch and before. DeepSeek-V2-Lite (float32, 64 experts, width 2048; a cast, the product,
its reduction, the choice): 33 tokens 5.4 and 12.6, 64 5.5 and 12.9, 100 6.8 and 13.0, 200 7.8 and 13.7, 400 9.4 and 19.1;
24 tokens took 7.4 in one launch without the tensor cores. Qwen3-30B-A3B (bf16, 128 experts, width 2048; the product, the
choice): 33 tokens 8.1 and 9.0. More tokens of routers of 16 bits, and routers of fewer experts, were not timed."""
_MOST_EXPERTS = 512
_EXPERTS = 4
"""Of a program."""
_MOST_ALONE = 8
"""Up to this number of tokens, each has programs of its own."""
_TOKENS = 4
"""Of a program, where there are more. On an H200, us of DeepSeek-V2-Lite's router by 4 and by 1 token per program: 2 tokens
5.5 and 3.5, 4 tokens 5.5 and 3.7, 8 tokens 5.5 and 4.5, 16 tokens 5.9 and 5.9."""
_MANY_TOKENS_A_PROGRAM, _MANY_EXPERTS_A_PROGRAM = 16, 64
_ROUTER_BYTES_A_PROGRAM = 1 << 15
"""Of a product on the tensor cores. On an H200, us of DeepSeek-V2-Lite's router with 33 and 400 tokens, by tokens x experts
x columns of a program: 16 x 64 x 128 5.4 and 9.4, 16 x 32 x 256 7.1 and 14.3, 32 x 32 x 256 9.7 and 12.5, 16 x 16 x 256
8.3 and 22, 16 x 16 x 512 90 and 231; of Qwen3-30B-A3B's with 33: 16 x 32 x 512 7.7, 16 x 64 x 256 8.1, 16 x 128 x 128 8.7,
16 x 16 x 256 9.0."""
_MOST_RANKED_A_WARP = 1 << 12
"""Pairs of experts that a warp compares."""
_SOME = 1e-20
"""Keeps a sum of scores from being 0."""


@triton.jit
def _best_experts(
    left,
    score,
    SCORED: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKED: tl.constexpr,
):
    """(the K experts with the most `left`, the first of equal ones; and what they have: of `left`, or with SCORED of
    `score`), both [TOKENS, BLOCK_K]. Behind the first K both are 0."""
    expert = tl.arange(0, BLOCK)[None, :]
    choice = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([TOKENS, BLOCK_K], tl.int32)
    found = tl.zeros([TOKENS, BLOCK_K], tl.float32)
    free = (expert < E) & (left == left)
    if RANKED:
        # Each is compared with every other one: two sums in place of two for every place.
        own, other = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
        ahead = left[:, None, :] > left[:, :, None]
        ahead = ahead | ((left[:, None, :] == left[:, :, None]) & (other < own))
        rank = tl.where(free, tl.sum((ahead & free[:, None, :]).to(tl.int32), 2), BLOCK)
        is_there = (rank[:, :, None] == choice[:, None, :]) & (choice < K)[:, None, :]
        chosen = tl.sum(tl.where(is_there, own, 0), 1)
        if SCORED:
            found = tl.sum(tl.where(is_there, score[:, :, None], 0.0), 1)
        else:
            found = tl.sum(tl.where(is_there, left[:, :, None], 0.0), 1)
        return chosen, found
    for place in tl.static_range(K):
        best = tl.max(left, 1)
        first = tl.min(tl.where((left == best[:, None]) & free, expert, BLOCK), 1)
        is_first = expert == first[:, None]
        if SCORED:
            value = tl.sum(tl.where(is_first, score, 0.0), 1)
        else:
            value = best
        chosen = tl.where(choice == place, first[:, None], chosen)
        found = tl.where(choice == place, value[:, None], found)
        free = free & (expert != first[:, None])
        left = tl.where(is_first, float("-inf"), left)
    return chosen, found


@triton.jit
def _in_kept_groups(
    left, KEPT: tl.constexpr, GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """Experts of other groups are at -infinity."""
    by_group = tl.reshape(left, [TOKENS, GROUPS, BLOCK // GROUPS])
    rank = tl.max(by_group, 2)
    if BEST_TWO:
        at = tl.argmax(by_group, 2)
        member = tl.arange(0, BLOCK // GROUPS)
        others = tl.where(member[None, None, :] == at[:, :, None], float("-inf"), by_group)
        rank += tl.max(others, 2)
    group = tl.arange(0, GROUPS)[None, :]
    dropped = rank == rank
    for _ in tl.static_range(KEPT):
        best = tl.max(tl.where(dropped, rank, float("-inf")), 1)
        first = tl.min(tl.where(dropped & (rank == best[:, None]), group, GROUPS), 1)
        dropped = dropped & (group != first[:, None])
    return tl.reshape(tl.where(dropped[:, :, None], float("-inf"), by_group), [TOKENS, BLOCK])


@triton.jit
def _choose(
    value,
    token,
    real,
    bias,
    weights,
    ids,
    loc,
    forced,
    lines,
    least_sum,
    scale,
    always_weight,
    PADDED: tl.constexpr,
    FORCED: tl.constexpr,
    ALWAYS: tl.constexpr,
    SCORED: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    RENORMALISE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKED: tl.constexpr,
):
    """Writes weights and experts of the tokens `token` that are `real`, both [TOKENS], from their logits `value`, float32
    [TOKENS, BLOCK], which are at -infinity beyond E."""
    expert = tl.arange(0, BLOCK)[None, :]
    choice = tl.arange(0, BLOCK_K)[None, :]
    if SCORED:
        if SIGMOID:
            score = tl.sigmoid(value)
        else:
            score = tl.exp(value - tl.max(value, 1)[:, None])
            score = score / tl.sum(score, 1)[:, None]
        left = score
        if BIASED:
            left += tl.load(bias + expert, mask=expert < E, other=0.0)
        left = tl.where(expert < E, left, float("-inf"))
        if GROUPS > 1:
            left = _in_kept_groups(left, KEPT, GROUPS, BEST_TWO, TOKENS, BLOCK)
        chosen, weight = _best_experts(left, score, True, E, K, TOKENS, BLOCK, BLOCK_K, RANKED)
    else:
        top = tl.max(value, 1)[:, None]
        total = tl.sum(tl.exp(value - top), 1)[:, None]
        chosen, best = _best_experts(value, value, False, E, K, TOKENS, BLOCK, BLOCK_K, RANKED)
        weight = tl.where(choice < K, tl.exp(best - top) / total, 0.0)
    if RENORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, 1), least_sum)[:, None]
    weight = weight * scale
    if FORCED:
        line = (token % lines)[:, None]
        chosen = tl.load(forced + line * K + choice, mask=real[:, None] & (choice < K), other=0)
    if ALWAYS > 0:
        chosen = tl.where(choice >= K, E + choice - K, chosen)
        weight = tl.where(choice >= K, always_weight, weight)
    if PADDED:
        place = tl.load(loc + token, mask=real, other=-1)
        chosen = tl.where((place < 0)[:, None], -1, chosen)
    inside = real[:, None] & (choice < K + ALWAYS)
    at = token[:, None] * (K + ALWAYS) + choice
    tl.store(weights + at, weight, mask=inside)
    tl.store(ids + at, chosen, mask=inside)


@triton.jit
def _choice_kernel(
    logits,
    bias,
    weights,
    ids,
    loc,
    forced,
    stride,
    lines,
    least_sum,
    scale,
    always_weight,
    PADDED: tl.constexpr,
    FORCED: tl.constexpr,
    ALWAYS: tl.constexpr,
    SCORED: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    RENORMALISE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program a token."""
    trigger(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    expert = tl.arange(0, BLOCK)[None, :]
    value = tl.load(logits + token[:, None] * stride + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    _choose(
        value, token, token >= 0, bias, weights, ids, loc, forced, lines, least_sum, scale, always_weight,
        PADDED, FORCED, ALWAYS, SCORED, BIASED, SIGMOID, GROUPS, KEPT, BEST_TWO, RENORMALISE, E, K, 1, BLOCK, BLOCK_K,
        RANKED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    x,
    router,
    router_bias,
    logits,
    counters,
    bias,
    weights,
    ids,
    loc,
    forced,
    x_stride,
    router_stride,
    lines,
    T,
    least_sum,
    scale,
    always_weight,
    D: tl.constexpr,
    ADDS: tl.constexpr,
    PADDED: tl.constexpr,
    FORCED: tl.constexpr,
    ALWAYS: tl.constexpr,
    SCORED: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    RENORMALISE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has EXPERTS rows of the router and TOKENS tokens."""
    trigger(PDL)
    DTYPE: tl.constexpr = router.dtype.element_ty
    mine = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    real = token < T
    dim = tl.arange(0, BLOCK_D)
    router_at = router + mine[:, None] * router_stride + dim[None, :]
    x_at = x + token[:, None] * x_stride + dim[None, :]
    tile = tl.load(router_at, mask=(mine < E)[:, None] & (dim < D)[None, :], other=0.0)
    wait(PDL)
    rows = tl.load(x_at, mask=real[:, None] & (dim < D)[None, :], other=0.0)
    sums = rows.to(tl.float32)[:, None, :] * tile.to(tl.float32)[None, :, :]
    for base in tl.static_range(BLOCK_D, D, BLOCK_D):
        inside = base + dim < D
        tile = tl.load(router_at + base, mask=(mine < E)[:, None] & inside[None, :], other=0.0)
        rows = tl.load(x_at + base, mask=real[:, None] & inside[None, :], other=0.0)
        sums += rows.to(tl.float32)[:, None, :] * tile.to(tl.float32)[None, :, :]
    made = tl.sum(sums, 2)
    if ADDS:
        made += tl.load(router_bias + mine, mask=mine < E, other=0.0).to(tl.float32)[None, :]
    # Rounded as logits would be if a product stored them.
    made = made.to(DTYPE).to(tl.float32)
    tl.store(logits + token[:, None] * E + mine[None, :], made, mask=real[:, None] & (mine < E)[None, :])
    tl.debug_barrier()
    done = tl.atomic_add(counters + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(counters + tl.program_id(1), 0)
        expert = tl.arange(0, BLOCK)[None, :]
        value = tl.load(
            logits + token[:, None] * E + expert, mask=real[:, None] & (expert < E), other=0.0, cache_modifier=".cg"
        )
        value = tl.where(expert < E, value, float("-inf"))
        _choose(
            value, token, real, bias, weights, ids, loc, forced, lines, least_sum, scale, always_weight,
            PADDED, FORCED, ALWAYS, SCORED, BIASED, SIGMOID, GROUPS, KEPT, BEST_TWO, RENORMALISE, E, K, TOKENS, BLOCK,
            BLOCK_K, RANKED,
        )  # fmt: skip


@triton.jit
def _product_of(tile, rows, acc):
    """acc + tile @ rows.T, exact but for the sums: a float32 tile, whose rows are bf16, is the sum of three in bf16."""
    across = tl.trans(rows)
    if tile.dtype == rows.dtype:
        return tl.dot(tile, across, acc)
    else:  # noqa: RET505 - Triton needs one return a branch
        first = tile.to(rows.dtype)
        rest = tile - first.to(tl.float32)
        second = rest.to(rows.dtype)
        third = (rest - second.to(tl.float32)).to(rows.dtype)
        acc = tl.dot(third, across, acc)
        acc = tl.dot(second, across, acc)
        return tl.dot(first, across, acc)


@triton.jit(do_not_specialize=["T"])
def _route_many_kernel(
    x,
    router,
    router_bias,
    partial,
    counters,
    bias,
    weights,
    ids,
    loc,
    forced,
    x_stride,
    router_stride,
    lines,
    T,
    least_sum,
    scale,
    always_weight,
    D: tl.constexpr,
    ADDS: tl.constexpr,
    PADDED: tl.constexpr,
    FORCED: tl.constexpr,
    ALWAYS: tl.constexpr,
    SCORED: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    RENORMALISE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has EXPERTS rows of the router, TOKENS tokens and BLOCK_D columns."""
    trigger(PDL)
    DTYPE: tl.constexpr = router.dtype.element_ty
    part = tl.program_id(0) % PARTS
    mine = tl.program_id(0) // PARTS * EXPERTS + tl.arange(0, EXPERTS)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    real = token < T
    dim = part * BLOCK_D + tl.arange(0, BLOCK_D)
    router_at = router + mine[:, None] * router_stride + dim[None, :]
    x_at = x + token[:, None] * x_stride + dim[None, :]
    tile = tl.load(router_at, mask=(mine < E)[:, None] & (dim < D)[None, :], other=0.0)
    wait(PDL)
    rows = tl.load(x_at, mask=real[:, None] & (dim < D)[None, :], other=0.0)
    acc = _product_of(tile, rows, tl.zeros([EXPERTS, TOKENS], tl.float32))
    at = partial + (part * T + token)[None, :] * E + mine[:, None]
    tl.store(at, acc, mask=real[None, :] & (mine < E)[:, None])
    tl.debug_barrier()
    done = tl.atomic_add(counters + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(counters + tl.program_id(1), 0)
        expert = tl.arange(0, BLOCK)[None, :]
        there = real[:, None] & (expert < E)
        value = tl.zeros([TOKENS, BLOCK], tl.float32)
        for each in tl.static_range(PARTS):
            value += tl.load(
                partial + (each * T + token)[:, None] * E + expert, mask=there, other=0.0, cache_modifier=".cg"
            )
        if ADDS:
            value += tl.load(router_bias + expert, mask=expert < E, other=0.0).to(tl.float32)
        # Rounded as logits would be if a product stored them.
        value = tl.where(expert < E, value.to(DTYPE).to(tl.float32), float("-inf"))
        _choose(
            value, token, real, bias, weights, ids, loc, forced, lines, least_sum, scale, always_weight,
            PADDED, FORCED, ALWAYS, SCORED, BIASED, SIGMOID, GROUPS, KEPT, BEST_TWO, RENORMALISE, E, K, TOKENS, BLOCK,
            BLOCK_K, False,
        )  # fmt: skip


_CHOICE = Launcher(_choice_kernel)
_ROUTE = Launcher(_route_kernel)
_ROUTE_MANY = Launcher(_route_many_kernel)


def choose(logits_TE: Tensor, how: Choosing, loc_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `reference.choose`."""
    tokens, experts = logits_TE.shape
    if not _fits(experts, how):
        return reference.choose(logits_TE, how, loc_T)
    logits = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    weights, ids = _room(tokens, how, logits.device)
    if tokens:
        tensors, lines, floats, constants = _told(how, loc_T, weights, ids, experts)
        num_warps = 1 if experts <= 256 else 4
        _CHOICE.launch(
            (tokens, 1), (logits, *tensors), (logits.stride(0), lines), floats,
            (*constants, power_of_two(experts), power_of_two(how.width), _is_ranked(experts, 1, num_warps)),
            num_warps=num_warps,
        )  # fmt: skip
    return weights, ids


def suits(x_TD: Tensor, router_ED: Tensor, how: Choosing) -> bool:
    """Whether one launch serves these tokens, and had better."""
    experts = len(router_ED)
    served = 1 <= len(x_TD) <= FEW_TOKENS or takes_tensor_cores(x_TD, router_ED)
    served = served and experts <= _MOST_EXPERTS
    return served and x_TD.stride(1) == 1 and router_ED.stride(1) == 1 and _fits(experts, how)


def takes_tensor_cores(x_TD: Tensor, router_ED: Tensor) -> bool:
    """Whether a product on the tensor cores is faster, and as exact as the router wants it."""
    if len(x_TD) not in MANY_TOKENS.get(router_ED.dtype, ()) or len(router_ED) < _MANY_EXPERTS_A_PROGRAM:
        return False
    return x_TD.dtype in (router_ED.dtype, torch.bfloat16) and x_TD.dtype != torch.float32


def route(
    x_TD: Tensor, router_ED: Tensor, router_bias_E: Tensor | None, how: Choosing, loc_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `moe.route`, for which `suits`."""
    if takes_tensor_cores(x_TD, router_ED):
        return route_many(x_TD, router_ED, router_bias_E, how, loc_T)
    tokens, depth = x_TD.shape
    experts, device = len(router_ED), x_TD.device
    weights, ids = _room(tokens, how, device)
    at_once = 1 if tokens <= _MOST_ALONE else _TOKENS
    groups = cdiv(tokens, at_once)
    logits, counters = SCRATCH.get(device, tokens * experts, groups)
    tensors, lines, floats, constants = _told(how, loc_T, weights, ids, experts)
    block_d = min(power_of_two(depth), 4096 if tokens == 1 else 1024)
    _ROUTE.launch(
        (cdiv(experts, _EXPERTS), groups),
        (x_TD, router_ED, router_ED if router_bias_E is None else router_bias_E, logits, counters, *tensors),
        (x_TD.stride(0), router_ED.stride(0), lines),
        floats,
        (
            depth, router_bias_E is not None, *constants, at_once, _EXPERTS, block_d, power_of_two(experts),
            power_of_two(how.width), _is_ranked(experts, at_once, 8),
        ),
        num_warps=8,
        counts=(tokens,),
    )  # fmt: skip
    return weights, ids


def route_many(
    x_TD: Tensor, router_ED: Tensor, router_bias_E: Tensor | None, how: Choosing, loc_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `moe.route`, for which `takes_tensor_cores`."""
    tokens, depth = x_TD.shape
    experts, device = len(router_ED), x_TD.device
    weights, ids = _room(tokens, how, device)
    block_d = _ROUTER_BYTES_A_PROGRAM // _MANY_EXPERTS_A_PROGRAM // router_ED.element_size()
    parts, groups = cdiv(depth, block_d), cdiv(tokens, _MANY_TOKENS_A_PROGRAM)
    partial, counters = SCRATCH.get(device, parts * tokens * experts, groups)
    tensors, lines, floats, constants = _told(how, loc_T, weights, ids, experts)
    _ROUTE_MANY.launch(
        (cdiv(experts, _MANY_EXPERTS_A_PROGRAM) * parts, groups),
        (x_TD, router_ED, router_ED if router_bias_E is None else router_bias_E, partial, counters, *tensors),
        (x_TD.stride(0), router_ED.stride(0), lines),
        floats,
        (
            depth, router_bias_E is not None, *constants, _MANY_TOKENS_A_PROGRAM, _MANY_EXPERTS_A_PROGRAM, block_d, parts,
            power_of_two(experts), power_of_two(how.width),
        ),
        num_warps=4,
        counts=(tokens,),
    )  # fmt: skip
    return weights, ids


def _fits(experts: int, how: Choosing) -> bool:
    """Groups are rows of a block, whose sides are powers of two."""
    return how.scoring is None or how.scoring.groups == 1 or not experts & (experts - 1)


def _is_ranked(experts: int, tokens: int, num_warps: int) -> bool:
    """Whether a program of `tokens` ranks all experts at once, rather than take the best one after the other.

    Microseconds on an H200, one after the other and at once. Router and choice, 8 warps, 1 token: 32 experts 3.4 and 3.2, 64
    5.3 and 4.6, 128 5.1 and 3.6; 4 tokens a program, 64 experts: 6.0 and 7.2. The choice alone, a warp and a token: 32
    experts 1.5 and 1.2, 64 1.9 and 1.8, 128 1.8 and 3.3."""
    return tokens == 1 and power_of_two(experts) ** 2 <= _MOST_RANKED_A_WARP * num_warps


def _room(tokens: int, how: Choosing, device: torch.device) -> tuple[Tensor, Tensor]:
    weights = torch.empty((tokens, how.width), dtype=torch.float32, device=device)
    return weights, torch.empty((tokens, how.width), dtype=torch.int32, device=device)


def _told(
    how: Choosing, loc_T: Tensor | None, weights: Tensor, ids: Tensor, experts: int
) -> tuple[tuple[Tensor, ...], int, tuple[float, ...], tuple[object, ...]]:
    """(tensors, lines of forced experts, floats, constants) of the kernels."""
    scoring, forced = how.scoring, how.forced_nk
    tensors = (
        weights if how.bias_E is None else how.bias_E,
        weights,
        ids,
        ids if loc_T is None else loc_T,
        ids if forced is None else forced,
    )
    lines = 1 if forced is None else len(forced)
    told = (loc_T is not None, forced is not None, how.always, scoring is not None, how.bias_E is not None)
    if scoring is None:
        floats = (_SOME, 1.0, how.always_weight)
        return tensors, lines, floats, (*told, False, 1, 1, False, how.renormalise, experts, how.per_token)
    floats = (max(scoring.least_sum, _SOME), scoring.scale, how.always_weight)
    kind = (scoring.sigmoid, scoring.groups, scoring.kept_groups, scoring.best_two, scoring.renormalise)
    return tensors, lines, floats, (*told, *kind, experts, how.per_token)
