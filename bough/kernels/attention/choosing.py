# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Which tokens queries read in sparse attention, on the GPU: scores of all tokens of a row, then the best of them.

Both kernels have a grid that depends on bounds alone, so that graphs capture them; programs end where their row does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.config.step_memory import INDEX_PAIRS
from bough.kernels.attention import sparse
from bough.kernels.attention.inputs import AttentionInputs, IndexQueries, Spec
from bough.kernels.attention.plan import _search
from bough.kernels.launching import cdiv, power_of_two

BLOCK_S = 64
"""Tokens that are scored at once."""
SPLITS = 64
"""Programs of a query that score, at most: they take blocks in turn."""
BLOCK_K = 1024
"""Scores that are compared at once."""
_DIGIT = tl.constexpr(8)
_BINS = tl.constexpr(256)


@triton.jit
def _seen_of(query_start, kv_len, token, num_rows, STEPS: tl.constexpr):
    """(the row of a token, KV tokens up to its own; 0: it has no row)."""
    row = _search(query_start, token, num_rows, STEPS) - 1
    end = tl.load(query_start + row + 1)
    length = tl.load(kv_len + row)
    seen = length - (end - 1 - token)
    return row, tl.where((token < end) & (length > 0), seen, 0), tl.where(token < end, length, 0)


@triton.jit(do_not_specialize=["first", "num_rows", "num_scores"])
def _score_kernel(
    q,
    weights,
    cache,
    query_start,
    kv_len,
    slots,
    page_table,
    tree_seen,
    tree_tail,
    scores,
    first,
    num_rows,
    num_scores,
    table_stride,
    q_token,
    q_head,
    weights_token,
    TREE: tl.constexpr,
    TOPK: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    place = tl.program_id(0)
    token = first + place
    row, seen, length = _seen_of(query_start, kv_len, token, num_rows, STEPS)
    if TREE:
        seen = length  # positions that a node does not see are masked below
    elif seen <= TOPK:
        seen = 0  # all of them are read: none has to be scored
    head, dim = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D)
    inside = (head < HEADS)[:, None] & (dim < D)[None, :]
    q_at = q + token.to(tl.int64) * q_token + head[:, None] * q_head + dim[None, :]
    q_ID = tl.load(q_at, mask=inside, other=0.0)
    weight = tl.load(weights + token.to(tl.int64) * weights_token + head, mask=head < HEADS, other=0.0)
    table = page_table + tl.load(slots + row).to(tl.int64) * table_stride
    out = scores + place.to(tl.int64) * num_scores
    for n in tl.range(tl.program_id(1) * BLOCK_S, seen, SPLITS * BLOCK_S):
        key = n + tl.arange(0, BLOCK_S)
        here = key < seen
        page = tl.load(table + key // PAGE, mask=here, other=0).to(tl.int64)
        k_at = cache + (page * PAGE + key % PAGE)[None, :] * D + dim[:, None]
        k_DS = tl.load(k_at, mask=here[None, :] & (dim < D)[:, None], other=0.0).to(q_ID.dtype)
        by_head = tl.maximum(tl.dot(q_ID, k_DS, input_precision=PRECISION), 0.0)
        score = tl.sum(by_head * weight[:, None], 0) + 0.0  # -0.0 becomes 0.0
        if TREE:
            tail = tl.load(tree_tail + token)
            bits = tl.load(tree_seen + token)
            beyond = key - tail
            bit = (bits >> tl.minimum(tl.maximum(beyond, 0), 63).to(tl.int64)) & 1
            score = tl.where((beyond < 0) | ((beyond < 64) & (bit == 1)), score, float("-inf"))
        tl.store(out + key, score, mask=here)


@triton.jit
def _ordered(scores, key, seen):
    """uint32 that are ordered as the scores are; 0 for what is -inf or does not exist."""
    score = tl.load(scores + key, mask=key < seen, other=float("-inf"))
    bits = score.to(tl.uint32, bitcast=True)
    flipped = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score == float("-inf"), 0, flipped)


@triton.jit(do_not_specialize=["first", "num_rows", "num_scores"])
def _select_kernel(
    scores,
    query_start,
    kv_len,
    slots,
    page_table,
    chosen,
    count,
    first,
    num_rows,
    num_scores,
    table_stride,
    TREE: tl.constexpr,
    TOPK: tl.constexpr,
    PAGE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the score of the last token that is taken, eight bits at a time, and then writes where those tokens lie."""
    place = tl.program_id(0)
    token = first + place
    row, seen, length = _seen_of(query_start, kv_len, token, num_rows, STEPS)
    mine = scores + place.to(tl.int64) * num_scores
    lane = tl.arange(0, BLOCK)
    taken = seen
    takes_all = seen <= TOPK
    if TREE:
        seen = length
        taken = length * 0
        for n in tl.range(0, seen, BLOCK):
            taken += tl.sum((_ordered(mine, n + lane, seen) > 0).to(tl.int32), 0)
        takes_all = length < 0
    taken = tl.minimum(taken, TOPK)
    prefix = tl.cast(0, tl.uint32)
    need = taken
    equals = 0
    if not takes_all:
        for digit in tl.static_range(32 // _DIGIT):
            shift = 32 - _DIGIT * (digit + 1)
            counts = tl.zeros([2 * _BINS], tl.int32)
            for n in tl.range(0, seen, BLOCK):
                ordered = _ordered(mine, n + lane, seen)
                within = (n + lane < seen) & ((((ordered ^ prefix) >> shift) >> _DIGIT) == 0)
                bin = ((ordered >> shift) & (_BINS - 1)).to(tl.int32)
                counts += tl.histogram(tl.where(within, bin, _BINS), 2 * _BINS)
            bins = tl.arange(0, 2 * _BINS)
            counts = tl.where(bins < _BINS, counts, 0)
            above = tl.cumsum(counts, 0, reverse=True)  # tokens of this bin and of those above it
            best = tl.max(tl.where(above >= need, bins, 0), 0)
            equals = tl.sum(tl.where(bins == best, counts, 0), 0)
            need -= tl.sum(tl.where(bins == best, above - counts, 0), 0)
            prefix = prefix | (best.to(tl.uint32) << shift)
    passed = equals - need  # the oldest of those with the last score are left out
    table = page_table + tl.load(slots + row).to(tl.int64) * table_stride
    out = chosen + token.to(tl.int64) * TOPK
    done, level = 0, 0
    for n in tl.range(0, seen, BLOCK):
        key = n + lane
        is_taken = key < seen
        if not takes_all:
            ordered = _ordered(mine, key, seen)
            is_level = is_taken & (ordered == prefix)
            number = level + tl.cumsum(is_level.to(tl.int32), 0)
            is_taken = is_taken & ((ordered > prefix) | (is_level & (number > passed)))
            level += tl.sum(is_level.to(tl.int32), 0)
        at = done + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        page = tl.load(table + key // PAGE, mask=is_taken, other=0)
        tl.store(out + at, page * PAGE + key % PAGE, mask=is_taken)
        done += tl.sum(is_taken.to(tl.int32), 0)
    tl.store(count + token, taken)


def choose(spec: Spec, inputs: AttentionInputs, index: IndexQueries, table_TK: Tensor, count_T: Tensor) -> None:
    """Fills `table_TK` with the locations of each query's tokens, in their order, and `count_T`: as `sparse.best` chooses.

    Keys are in their pages. Scores exist for some queries at a time.
    """
    cache, tree = sparse.cache_of(inputs, spec), inputs.tree
    tokens, rows = len(table_TK), inputs.num_rows
    _, num_heads, width = index.q_TID.shape
    at_once = min(tokens, max(1, INDEX_PAIRS // inputs.max_kv))
    scores = torch.empty((at_once, inputs.max_kv), dtype=torch.float32, device=table_TK.device)
    of_rows = (inputs.query_start_R1, inputs.kv_len_R, inputs.slots_R, inputs.page_table)
    shared = {
        "TREE": tree is not None,
        "TOPK": spec.topk,
        "PAGE": inputs.page_size,
        "STEPS": rows.bit_length() + 1,
    }
    splits = min(SPLITS, cdiv(inputs.max_kv, BLOCK_S))
    q, weights = index.q_TID, index.weights_TI
    for first in range(0, tokens, at_once):
        num = min(at_once, tokens - first)
        _score_kernel[(num, splits)](
            q,
            weights,
            cache,
            *of_rows,
            weights if tree is None else tree.seen_T,
            weights if tree is None else tree.tail_T,
            scores,
            first,
            rows,
            inputs.max_kv,
            inputs.page_table.stride(0),
            q.stride(0),
            q.stride(1),
            weights.stride(0),
            **shared,
            HEADS=num_heads,
            D=width,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            SPLITS=splits,
            BLOCK_I=power_of_two(num_heads, 16),
            BLOCK_D=power_of_two(width, 16),
            BLOCK_S=BLOCK_S,
        )
        _select_kernel[(num,)](
            scores,
            *of_rows,
            table_TK,
            count_T,
            first,
            rows,
            inputs.max_kv,
            inputs.page_table.stride(0),
            **shared,
            BLOCK=BLOCK_K,
        )
