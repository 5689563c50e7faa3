# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Sampling on the GPU: two or three passes over the logits, no sort.

The first kernel reads every logit, in stretches of the vocabulary: largest logit, sum of exponentials, and the best of
logit / temperature + noise over the whole row (for these two, what it has just read is read again). The second settles a
row: the drawn token is right if it passes the filters, which one more pass finds by counting what is likelier. If it
doesn't, no token of its logit or below passes either, so the best noisy token above it is next; the same pass counts above
a few higher levels too, to skip most of what is left. In the end that token is the best of all kept ones, as if they had
been cut out first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import cdiv, pdl_options, power_of_two, trigger, wait

_STRETCH = 4096
"""Entries of a row that a program of the first kernel reads..."""
_NOISE = 512
"""...for how many of them it makes noise at a time..."""
_WARPS = 4
"""...and with how many warps. The same for all steps: what is summed together must not depend on the batch."""
_SCAN = 2048
_LEVELS = 4


@triton.jit
def _noise(seed, counter, block):
    """float32 [n, 4] Gumbel noise of vocabulary entries 4 * block .. 4 * block + 3."""
    c0 = block.to(tl.uint32)
    zero = c0 * 0
    c1 = zero + (counter & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, c2, zero)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    return _gumbel(tl.reshape(words, [block.shape[0], 4]))


@triton.jit
def _noise_of(ids, seed, counter, index, V):
    """float32 [n, 4] Gumbel noise of the vocabulary entries that `ids` names at `index`: each has a word of its block."""
    entry = tl.load(ids + index, mask=index < V, other=0)
    c0 = (entry // 4).to(tl.uint32)
    zero = c0 * 0
    c1 = zero + (counter & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, c2, zero)
    word = entry % 4
    bits = tl.where(word == 0, r0, tl.where(word == 1, r1, tl.where(word == 2, r2, r3)))
    return _gumbel(bits)


@triton.jit
def _gumbel(bits):
    u = tl.minimum(bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.999999940395)
    small = u * (1.0 + u * (0.5 + u * 0.3333333333333333))
    return -tl.log(tl.where(u < 1e-3, small, -tl.log(1.0 - u)))


@triton.jit
def _first_best(score, index):
    """(largest score, smallest index that has it) over all elements."""
    best = tl.max(score)
    return best, tl.min(tl.where(score == best, index, 2147483647))


@triton.jit
def _scan_kernel(
    logits,
    ids,
    temperature,
    seeds,
    counters,
    tops,
    top_ids,
    sums,
    scores,
    score_ids,
    V,
    stride,
    DRAW: tl.constexpr,
    STRETCH: tl.constexpr,
    NOISE: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    trigger(PDL)
    wait(PDL)
    logits += row.to(tl.int64) * stride
    index = part * STRETCH + tl.arange(0, STRETCH)
    value = tl.load(logits + index, mask=index < V, other=float("-inf")).to(tl.float32)
    place = row * tl.num_programs(1) + part
    top, top_id = _first_best(value, index)
    tl.store(tops + place, top)
    tl.store(top_ids + place, top_id)
    if DRAW:
        warmth = tl.load(temperature + row)
        if warmth > 0.0:
            inverse = 1.0 / tl.maximum(warmth, 1e-10)
            anchor = tl.where(top == float("-inf"), 0.0, top)
            mass, score, score_id = _draw(
                logits, ids, part * STRETCH, anchor, inverse, tl.load(seeds + row), tl.load(counters + row), V, STRETCH,
                NOISE, MAPPED,
            )  # fmt: skip
            tl.store(sums + place, mass)
            tl.store(scores + place, score)
            tl.store(score_ids + place, score_id)


@triton.jit
def _draw(
    logits,
    ids,
    first,
    anchor,
    inverse,
    seed,
    counter,
    V,
    STRETCH: tl.constexpr,
    NOISE: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """(Sum of exponentials, best noisy logit, its first index) of a stretch, which has just been read: a few at a time, for
    noise takes many registers, and what takes few can be in flight more often."""
    block = first // 4 + tl.arange(0, NOISE // 4)
    index = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    mass = tl.zeros([NOISE // 4, 4], tl.float32)
    best = tl.full([NOISE // 4, 4], float("-inf"), tl.float32)
    best_id = index
    for _ in range(0, STRETCH, NOISE):
        value = tl.load(logits + index, mask=index < V, other=float("-inf")).to(tl.float32)
        mass += tl.exp(value * inverse - anchor * inverse)
        if MAPPED:
            noisy = value * inverse + _noise_of(ids, seed, counter, index, V)
        else:
            noisy = value * inverse + _noise(seed, counter, block)
        better = noisy > best
        best = tl.where(better, noisy, best)
        best_id = tl.where(better, index, best_id)
        block += NOISE // 4
        index += NOISE
    score, score_id = _first_best(best, best_id)
    return tl.sum(mass), score, score_id


@triton.jit
def _top_kernel(tops, top_ids, ids, out, V, PARTS, BLOCK: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    inside = part < PARTS
    trigger(PDL)
    wait(PDL)
    top = tl.load(tops + row * PARTS + part, mask=inside, other=float("-inf"))
    top_id = tl.load(top_ids + row * PARTS + part, mask=inside, other=2147483647)
    _, best_id = _first_best(top, top_id)
    best_id = tl.minimum(best_id, V - 1)  # nothing is best among what is not a number
    if MAPPED:
        tl.store(out + row, tl.load(ids + best_id))
    else:
        tl.store(out + row, best_id.to(tl.int64))


@triton.jit
def _settle_kernel(
    logits,
    ids,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    counters,
    tops,
    top_ids,
    sums,
    scores,
    score_ids,
    out,
    V,
    stride,
    PARTS,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    LEVELS: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    inside = part < PARTS
    trigger(PDL)
    wait(PDL)
    part_top = tl.load(tops + row * PARTS + part, mask=inside, other=float("-inf"))
    part_id = tl.load(top_ids + row * PARTS + part, mask=inside, other=2147483647)
    top, chosen = _first_best(part_top, part_id)
    warmth = tl.load(temperature + row)
    if warmth > 0.0:
        inverse = 1.0 / tl.maximum(warmth, 1e-10)
        part_sum = tl.load(sums + row * PARTS + part, mask=inside, other=0.0)
        share = tl.where(part_top == float("-inf"), 0.0, tl.exp((part_top - top) * inverse))
        total = tl.sum(part_sum * share)
        score = tl.load(scores + row * PARTS + part, mask=inside, other=float("-inf"))
        score_id = tl.load(score_ids + row * PARTS + part, mask=inside, other=2147483647)
        _, chosen = _first_best(score, score_id)
        k = tl.load(top_k + row).to(tl.int32)
        k = tl.where((k < 1) | (k > V), V + 1, k)
        p = tl.load(top_p + row)
        floor = tl.load(min_p + row)
        if ((k <= V) | (p < 1.0) | (floor > 0.0)) & (top > float("-inf")):  # where all is forbidden, nothing passes
            mass_limit = tl.where(p < 1.0, p * total, float("inf"))
            chosen = _settle(
                logits + row.to(tl.int64) * stride, ids, chosen, top, inverse, k, mass_limit, floor,
                tl.load(seeds + row), tl.load(counters + row), V, SCAN, LEVELS, MAPPED,
            )  # fmt: skip
    chosen = tl.minimum(chosen, V - 1)
    if MAPPED:
        tl.store(out + row, tl.load(ids + chosen))
    else:
        tl.store(out + row, chosen.to(tl.int64))


@triton.jit
def _settle(
    logits,
    ids,
    chosen,
    top,
    inverse,
    k,
    mass_limit,
    floor,
    seed,
    counter,
    V,
    SCAN: tl.constexpr,
    LEVELS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """The best noisy token that passes the filters, starting from the best of all."""
    done = False
    while not done:
        level = tl.load(logits + chosen).to(tl.float32)
        levels = level + (top - level) * (tl.arange(0, LEVELS).to(tl.float32) * (1.0 / LEVELS))
        count, mass = _above(logits, levels, top, inverse, V, SCAN, LEVELS)
        fails = (count >= k) | (mass >= mass_limit) | (tl.exp(levels * inverse - top * inverse) < floor)
        fails = fails & (levels < top)
        highest = tl.max(tl.where(fails, levels, float("-inf")))
        if highest < level:
            done = True
        else:
            chosen = _redraw(logits, ids, highest, inverse, seed, counter, V, SCAN, MAPPED)
    return chosen


@triton.jit
def _above(logits, levels, top, inverse, V, SCAN: tl.constexpr, LEVELS: tl.constexpr):
    """For each level: how many logits lie above it, and the sum of their exponentials."""
    count = tl.zeros([SCAN, LEVELS], tl.int32)
    mass = tl.zeros([SCAN, LEVELS], tl.float32)
    for base in tl.range(0, V, SCAN, num_stages=3):
        index = base + tl.arange(0, SCAN)
        value = tl.load(logits + index, mask=index < V, other=float("-inf")).to(tl.float32)
        weight = tl.exp(value * inverse - top * inverse)
        above = value[:, None] > levels[None, :]
        count += above.to(tl.int32)
        mass += tl.where(above, weight[:, None], 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _redraw(logits, ids, level, inverse, seed, counter, V, SCAN: tl.constexpr, MAPPED: tl.constexpr):
    """The best noisy token among those above the level; stretches without one are only looked at."""
    lane = tl.arange(0, SCAN // 4)
    best = tl.full([SCAN // 4, 4], float("-inf"), tl.float32)
    best_id = tl.full([SCAN // 4, 4], 2147483647, tl.int32)
    for base in tl.range(0, V, SCAN):
        block = base // 4 + lane
        index = block[:, None] * 4 + tl.arange(0, 4)[None, :]
        value = tl.load(logits + index, mask=index < V, other=float("-inf")).to(tl.float32)
        if tl.max(value) > level:
            if MAPPED:
                noisy = value * inverse + _noise_of(ids, seed, counter, index, V)
            else:
                noisy = value * inverse + _noise(seed, counter, block)
            better = (value > level) & ((noisy > best) | (best_id == 2147483647))
            best = tl.where(better, noisy, best)
            best_id = tl.where(better, index, best_id)
    _, chosen = _first_best(best, best_id)
    return chosen


def _parts(logits: Tensor) -> tuple[Tensor, int]:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, cdiv(logits.shape[1], _STRETCH)


def argmax(logits_RV: Tensor, ids_V: Tensor | None = None) -> Tensor:
    logits, parts = _parts(logits_RV)
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    tops = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    pdl = pdl_options(logits.device)
    ids = top_ids if ids_V is None else ids_V
    _scan_kernel[(rows, parts)](
        logits,
        ids,
        tops,
        tops,
        tops,
        tops,
        top_ids,
        tops,
        tops,
        top_ids,
        vocab,
        logits.stride(0),
        DRAW=False,
        STRETCH=_STRETCH,
        NOISE=_NOISE,
        MAPPED=False,
        num_warps=_WARPS,
        **pdl,
    )
    _top_kernel[(rows,)](
        tops, top_ids, ids, out, vocab, parts, BLOCK=power_of_two(parts), MAPPED=ids_V is not None, num_warps=1, **pdl
    )
    return out


def sample_among(
    logits_RV: Tensor,
    ids_V: Tensor,
    vocab: int,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    counters_R: Tensor,
) -> Tensor:
    return sample(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, counters_R, ids_V)


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    counters_R: Tensor,
    ids_V: Tensor | None = None,
) -> Tensor:
    logits, parts = _parts(logits_RV)
    rows, vocab = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    tops, sums, scores = torch.empty((3, rows, parts), dtype=torch.float32, device=device)
    top_ids, score_ids = torch.empty((2, rows, parts), dtype=torch.int32, device=device)
    pdl = pdl_options(device)
    ids, mapped = top_ids if ids_V is None else ids_V, ids_V is not None
    _scan_kernel[(rows, parts)](
        logits,
        ids,
        temperature_R,
        seeds_R,
        counters_R,
        tops,
        top_ids,
        sums,
        scores,
        score_ids,
        vocab,
        logits.stride(0),
        DRAW=True,
        STRETCH=_STRETCH,
        NOISE=_NOISE,
        MAPPED=mapped,
        num_warps=_WARPS,
        **pdl,
    )
    _settle_kernel[(rows,)](
        logits,
        ids,
        temperature_R,
        top_k_R,
        top_p_R,
        min_p_R,
        seeds_R,
        counters_R,
        tops,
        top_ids,
        sums,
        scores,
        score_ids,
        out,
        vocab,
        logits.stride(0),
        parts,
        BLOCK=power_of_two(parts),
        SCAN=_SCAN,
        LEVELS=_LEVELS,
        MAPPED=mapped,
        num_warps=16,
        **pdl,
    )
    return out
