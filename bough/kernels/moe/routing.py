# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Which experts tokens get, on the GPU: from logits, or for few tokens from what the router reads, in one launch either way.

The router's product of few tokens is cut by experts, and the program of some tokens that ends last chooses for them. T
tokens, E experts, k of them a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, power_of_two, trigger, wait
from bough.kernels.linear.skinny import SCRATCH
from bough.kernels.moe import Choosing, reference

MOST_TOKENS = 32
"""Whose router takes one launch; 0: of none."""
_MOST_EXPERTS = 512
_EXPERTS = 4
"""Of a program."""
_TOKENS = 4
"""Of a program, where there are several."""
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
):
    """(the K experts with the most `left`, the first of equal ones; and what they have: of `left`, or with SCORED of
    `score`), both [TOKENS, BLOCK_K]. Behind the first K both are 0."""
    expert = tl.arange(0, BLOCK)[None, :]
    choice = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([TOKENS, BLOCK_K], tl.int32)
    found = tl.zeros([TOKENS, BLOCK_K], tl.float32)
    free = (expert < E) & (left == left)
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
        chosen, weight = _best_experts(left, score, True, E, K, TOKENS, BLOCK, BLOCK_K)
    else:
        top = tl.max(value, 1)[:, None]
        total = tl.sum(tl.exp(value - top), 1)[:, None]
        chosen, best = _best_experts(value, value, False, E, K, TOKENS, BLOCK, BLOCK_K)
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
            BLOCK_K,
        )  # fmt: skip


_CHOICE = Launcher(_choice_kernel)
_ROUTE = Launcher(_route_kernel)


def choose(logits_TE: Tensor, how: Choosing, loc_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `reference.choose`."""
    tokens, experts = logits_TE.shape
    if not _fits(experts, how):
        return reference.choose(logits_TE, how, loc_T)
    logits = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    weights, ids = _room(tokens, how, logits.device)
    if tokens:
        tensors, lines, floats, constants = _told(how, loc_T, weights, ids, experts)
        _CHOICE.launch(
            (tokens, 1), (logits, *tensors), (logits.stride(0), lines), floats,
            (*constants, power_of_two(experts), power_of_two(how.width)), num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
    return weights, ids


def suits(x_TD: Tensor, router_ED: Tensor, how: Choosing) -> bool:
    """Whether one launch serves these tokens, and had better."""
    experts = len(router_ED)
    few = 1 <= len(x_TD) <= MOST_TOKENS and experts <= _MOST_EXPERTS
    return few and x_TD.stride(1) == 1 and router_ED.stride(1) == 1 and _fits(experts, how)


def route(
    x_TD: Tensor, router_ED: Tensor, router_bias_E: Tensor | None, how: Choosing, loc_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `moe.route`, for which `suits`."""
    tokens, depth = x_TD.shape
    experts, device = len(router_ED), x_TD.device
    weights, ids = _room(tokens, how, device)
    at_once = 1 if tokens == 1 else _TOKENS
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
            power_of_two(how.width),
        ),
        num_warps=8,
        counts=(tokens,),
    )  # fmt: skip
    return weights, ids


def _fits(experts: int, how: Choosing) -> bool:
    """Groups are rows of a block, whose sides are powers of two."""
    return how.scoring is None or how.scoring.groups == 1 or not experts & (experts - 1)


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
