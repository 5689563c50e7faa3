"""Mixtures of experts, and how tokens are grouped by them."""

from functools import partial

import numpy as np
import torch

from bough.config.model_facts import ClampedGate
from bough.kernels.moe import (
    Biases,
    Scoring,
    clamped_gate,
    grouping as laying,
    reference as moe_reference,
    triton as moe,
)
from bough.kernels.moe.grouping import group_tokens, round_rows, sum_parts
from bough.kernels.packed_moe.unpacked import add_biases, clamped_rows
from triton_cases.bed import FLOAT8, Bed, Cases, close, same_twice


def moe_cases(bed: Bed) -> Cases:
    if bed.large:
        shapes = [(1, 128, 8, 2048, 768), (64, 128, 8, 2048, 768), (300, 8, 2, 512, 320), (1000, 64, 6, 1000, 200)]
    else:
        shapes = [(1, 8, 2, 64, 32), (7, 8, 3, 48, 40), (40, 5, 2, 64, 64)]
    for dtype, shape, limit in bed.cover(bed.dtypes, shapes, (4096, 16)):
        yield f"experts {shape} {dtype} one program up to {limit}", partial(_moe, bed, shape, dtype, limit)
    sizes = ((256, 8, 4), (64, 1, 1), (160, 1, 1)) if bed.large else ((16, 4, 2), (12, 1, 1))
    for size, sigmoid, best_two in bed.cover(sizes, (False, True), (False, True)):
        yield f"scored {size} sigmoid {sigmoid} {best_two}", partial(_scored, bed, size, sigmoid, best_two)
    yield "clamped rows", partial(_clamped, bed)


def _scored(bed: Bed, size: tuple[int, int, int], sigmoid: bool, best_two: bool) -> None:
    (experts, groups, kept), tokens, k = size, 50 if bed.large else 6, 6 if bed.large else 3
    scoring = Scoring(sigmoid, groups, kept, best_two, bed.rng.random() < 0.5, bed.rng.choice((0.0, 0.3)), 2.5)
    logits, bias = bed.normal(tokens, experts), bed.normal(experts) if bed.rng.random() < 0.7 else None
    loc = bed.ints(np.arange(tokens) % 3 - 1, torch.int64) if bed.rng.random() < 0.5 else None
    weights, ids = moe.topk_scored(logits, k, scoring, bias, loc)
    want_weights, want_ids = moe_reference.topk_scored(logits, k, scoring, bias, loc)
    assert torch.equal(ids, want_ids)
    close(weights, want_weights, torch.float32)


def _clamped(bed: Bed) -> None:
    experts, inner, height = 5, 70, 64
    dtype = bed.dtypes[0]
    ids = bed.ints([[bed.rng.randrange(-1, experts)] for _ in range(90)])
    x = bed.normal(90, 2 * inner, dtype=dtype)
    grouping, rows, _ = group_tokens(x, ids, experts, height, fp8=False)
    bias = bed.normal(experts, 2 * inner, dtype=dtype)
    got = clamped_rows(rows, bias, grouping, height, ClampedGate(alpha=1.7, limit=1.0))
    here = ids[:, 0] >= 0
    want = clamped_gate(x[here].float() + bias[ids[here, 0].long()].float(), 1.7, 1.0).to(dtype)
    close(got[grouping.places_Tk[here, 0].long()], want, dtype)
    out = bed.normal(90, 2 * inner)
    weights = bed.normal(90, 1)
    added = out.clone()
    add_biases(added, bias.float(), weights, ids)
    close(added - out, torch.where(here[:, None], weights * bias.float()[ids[:, 0].long()], 0.0), dtype)


def _moe(bed: Bed, shape: tuple[int, int, int, int, int], dtype: torch.dtype, limit: int) -> None:
    tokens, experts, per_token, width, inner = shape
    logits = bed.normal(tokens, experts, dtype=dtype)
    logits[0, 1] = logits[0, 0]
    renormalise = bed.rng.random() < 0.5
    weights, ids = moe.topk_softmax(logits, per_token, renormalise)
    want_weights, want_ids = moe_reference.topk_softmax(logits, per_token, renormalise)
    assert torch.equal(ids, want_ids)
    close(weights, want_weights, torch.float32)
    loc = bed.ints(np.arange(tokens) % 3 - 1, torch.int64)
    padded, want_padded = (each.topk_softmax(logits, per_token, renormalise, loc)[1] for each in (moe, moe_reference))
    assert torch.equal(padded, want_padded)
    assert torch.equal((padded == -1).all(1), loc < 0)
    x = bed.normal(tokens, width, dtype=dtype)
    gate_up = bed.normal(experts, 2 * inner, width, dtype=dtype, scale=width**-0.5)
    down = bed.normal(experts, width, inner, dtype=dtype, scale=inner**-0.5)
    ids[tokens // 2, 0] = -1
    if tokens > 8:
        ids[5:8] = -1  # padding
    act = bed.rng.choice(("silu", "gelu_tanh"))
    before = moe._ONE_LAUNCH_PAIRS
    try:
        moe._ONE_LAUNCH_PAIRS = limit
        got = same_twice(lambda: moe.fused_experts(x, gate_up, down, weights, ids, act))
    finally:
        moe._ONE_LAUNCH_PAIRS = before
    close(got, moe_reference.fused_experts(x, gate_up, down, weights, ids, act), dtype)
    biases = Biases(bed.normal(experts, 2 * inner, dtype=dtype), bed.normal(experts, width, dtype=dtype))
    inputs = (x, gate_up, down, biases, weights, ids, 1.7, 0.8)
    close(moe.biased_experts(*inputs), moe_reference.biased_experts(*inputs), dtype)
    plain = (x, gate_up[:, :inner].contiguous(), down, weights, ids, lambda inside: inside.relu().square())
    close(same_twice(lambda: moe.plain_experts(*plain)), moe_reference.plain_experts(*plain), dtype)


def grouping_cases(bed: Bed) -> Cases:
    shapes = [(1, 128, 8, 2048, 64), (4000, 128, 8, 2048, 256), (600, 6, 2, 1000, 128)] if bed.large else [
        (37, 5, 2, 48, 64), (150, 7, 3, 40, 128), (1, 4, 2, 64, 256),
    ]  # fmt: skip
    for shape, fp8, limit in bed.cover(shapes, (False, True), (2048, 2048, 16)):
        yield f"grouping {shape} fp8 {fp8} one launch up to {limit}", partial(_grouping, bed, shape, fp8, limit)


def _grouping(bed: Bed, shape: tuple[int, int, int, int, int], fp8: bool, limit: int) -> None:
    """Every pair has a row of its own, in a tile of its expert, which holds its token."""
    tokens, experts, per_token, width, height = shape
    x = bed.normal(tokens, width).to(FLOAT8).to(torch.bfloat16)  # exact in e4m3, with a scale of 1
    x[:, 0] = 448
    ids = torch.rand(tokens, experts, device=bed.device).topk(per_token, 1).indices.to(torch.int32)
    ids[tokens // 2, 0] = bed.rng.choice((-1, experts))
    before = laying.MOST_AT_ONCE
    try:
        laying.MOST_AT_ONCE = limit
        grouping, rows, scales = group_tokens(x, ids, experts, height, fp8=fp8)
    finally:
        laying.MOST_AT_ONCE = before
    tiles = grouping.tiles[: int(grouping.num_tiles)].tolist()
    assert len(tiles) <= len(grouping.tiles)
    owner = torch.full((grouping.num_rows,), -1, device=bed.device)
    for first, end, expert, _ in tiles:
        assert first % 64 == end % 64 == 0
        assert first < end
        owner[first : min(first + height, end)] = expert
    here = (ids >= 0) & (ids < experts)
    places = grouping.places_Tk.long()
    assert torch.equal(here, places >= 0)
    assert len(places[here].unique()) == int(here.sum())
    assert torch.equal(owner[places[here]], ids[here].long())
    held = rows.float() if scales is None else rows.float() * scales[:, None]
    token = torch.arange(tokens, device=bed.device)[:, None].expand_as(places)
    assert torch.equal(held[places[here]], x[token[here]].float())
    parts, shares = bed.normal(grouping.num_rows, width, dtype=torch.bfloat16), torch.rand(ids.shape, device=bed.device)
    out = torch.empty_like(x)
    sum_parts(parts, shares, grouping, out)
    chosen = parts[places.clamp_min(0)].float() * (shares * here)[..., None]
    close(out, chosen.sum(1).to(torch.bfloat16), torch.bfloat16)
    exact, ones = round_rows(x)
    assert torch.equal(exact.float() * ones[:, None], x.float())
