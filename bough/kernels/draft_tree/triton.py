# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Trees of drafts on the GPU: a launch for what moves before a step, one for the walk, one for the KV along the paths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.draft_tree import TreePath, TreeStep, reference
from bough.kernels.launching import cdiv
from bough.kernels.step_end import SampleInputs
from bough.kernels.step_start import SlotState, StepInputs

_BLOCK = 128
_WORDS = 1024
"""4-byte words of a token that one program copies."""


@triton.jit(do_not_specialize=["num_tokens", "num_samples", "stride"])
def _start_kernel(
    kv_len,
    num_output,
    depth,
    seen,
    derived,
    positions,
    token_slots,
    counters,
    sample_slots,
    out_seen,
    out_tail,
    out_positions,
    out_counters,
    num_tokens,
    num_samples,
    stride,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_tokens
    is_derived = inside & (place < tl.load(derived))
    slot = tl.load(token_slots + place, mask=inside, other=0)
    position = tl.load(positions + place, mask=inside, other=0)
    begin = tl.load(kv_len + slot, mask=is_derived, other=0)
    node = position - begin
    is_node = is_derived & (node > 0)
    at = slot * stride + node - 1
    moved = tl.load(depth + at, mask=is_node, other=0)
    bits = tl.where(is_node, tl.load(seen + at, mask=is_node, other=0), is_derived.to(tl.int64))
    tl.store(out_positions + place, position, mask=inside)
    tl.store(out_seen + place, bits, mask=inside)
    tl.store(out_tail + place, tl.where(is_derived, begin, position + 1).to(tl.int32), mask=inside)
    tl.store(positions + place, begin + moved, mask=is_node)
    inside = place < num_samples
    is_derived = inside & (place < tl.load(derived + 2))
    slot = tl.load(sample_slots + place, mask=inside, other=0)
    counter = tl.load(counters + place, mask=inside, other=0)
    before = tl.load(num_output + slot, mask=is_derived, other=0)
    node = counter - before
    is_node = is_derived & (node > 0)
    moved = tl.load(depth + slot * stride + node - 1, mask=is_node, other=0)
    tl.store(out_counters + place, counter, mask=inside)
    tl.store(counters + place, before + moved, mask=is_node)


def start_tree(state: SlotState, inputs: StepInputs, sample_at_L: Tensor) -> TreeStep:
    tree = state.tree
    assert tree is not None, "made for a runner whose drafts are trees"
    num_tokens, num_samples = len(inputs.positions_T), len(inputs.counter_L)
    seen, chain = torch.empty_like(inputs.positions_T), torch.empty_like(inputs.positions_T)
    tail = torch.empty(num_tokens, dtype=torch.int32, device=seen.device)
    counters = torch.empty_like(inputs.counter_L)
    _start_kernel[(cdiv(max(num_tokens, num_samples), _BLOCK),)](
        state.kv_len, state.num_output, tree.depth, tree.seen, inputs.derived, inputs.positions_T, inputs.token_slots_T,
        inputs.counter_L, inputs.sample_slots_L, seen, tail, chain, counters, num_tokens, num_samples,
        tree.depth.shape[1], BLOCK=_BLOCK,
    )  # fmt: skip
    return TreeStep(seen, tail, chain, counters)


@triton.jit(do_not_specialize=["num_rows", "num_samples", "width", "stride", "spare"])
def _walk_kernel(
    last_token,
    kv_len,
    num_output,
    parents,
    ids,
    chain_positions,
    chain_counters,
    sample_at,
    sample_slots,
    starts,
    drawn,
    blocked,
    out,
    from_samples,
    from_tokens,
    places,
    num_rows,
    num_samples,
    width,
    stride,
    spare,
    BLOCKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    first = tl.load(starts + row, mask=inside, other=0)
    count = tl.load(starts + row + 1, mask=inside, other=0) - first
    first = tl.minimum(first, num_samples - 1)
    slot = tl.load(sample_slots + first, mask=inside, other=0)
    line = out + row.to(tl.int64) * (width + 1)
    mine = places + row.to(tl.int64) * width
    for place in range(width):
        tl.store(line + 1 + place, tl.full([BLOCK], -1, tl.int64), mask=inside)
        tl.store(mine + place, tl.zeros([BLOCK], tl.int64), mask=inside)
    goes_on = inside & (count > 0)
    if BLOCKED:
        goes_on = goes_on & (tl.load(blocked + first, mask=goes_on, other=1) == 0)
    token = tl.load(drawn + first, mask=goes_on, other=-1)
    yields = goes_on.to(tl.int64)
    here = row * 0
    tl.store(line + 1, token, mask=goes_on)
    root = tl.load(sample_at + first, mask=inside, other=0)
    # A node comes behind its parent: the path is found in one pass over the nodes.
    for node in range(1, stride + 1):
        follows = goes_on & (node < count) & (yields < width)
        is_child = follows & (tl.load(parents + slot * stride + node - 1, mask=follows, other=-1) == here)
        at = tl.load(sample_at + first + node, mask=is_child, other=0)
        taken = is_child & (tl.load(ids + at, mask=is_child, other=-1) == token)
        here = tl.where(taken, node, here)
        if BLOCKED:
            stops = taken & (tl.load(blocked + first + node, mask=taken, other=0) != 0)
            goes_on = goes_on & (stops == 0)
            taken = taken & (stops == 0)
        token = tl.where(taken, tl.load(drawn + first + node, mask=taken, other=-1), token)
        tl.store(line + 1 + yields, token, mask=taken)
        tl.store(mine + yields, (row * 0 + node).to(tl.int64), mask=taken)
        target = tl.load(sample_at + first + yields, mask=taken, other=0)
        tl.store(from_samples + first + yields, (first + node).to(tl.int64), mask=taken)
        tl.store(from_tokens + target, at, mask=taken)
        yields += taken.to(tl.int64)
    tl.store(line, yields, mask=inside)
    moves = yields > 0
    slot = tl.where(moves, slot, spare)
    tl.store(last_token + slot, token, mask=moves)
    tl.store(kv_len + slot, tl.load(chain_positions + root, mask=moves, other=0) + yields, mask=moves)
    tl.store(num_output + slot, tl.load(chain_counters + first, mask=moves, other=0) + yields, mask=moves)


def walk_tree(
    state: SlotState,
    inputs: SampleInputs,
    tree: TreeStep,
    drawn_L: Tensor,
    num_rows: int,
    width: int,
    blocked_L: Tensor | None,
) -> TreePath:
    assert state.tree is not None
    device, num_samples = drawn_L.device, len(drawn_L)
    out = torch.empty((num_rows, 1 + width), dtype=torch.int64, device=device)
    places = torch.empty((num_rows, width), dtype=torch.int64, device=device)
    from_L = torch.arange(num_samples, device=device)
    from_T = torch.arange(len(inputs.ids_T), device=device)
    _walk_kernel[(cdiv(num_rows, _BLOCK),)](
        state.last_token, state.kv_len, state.num_output, state.tree.parents, inputs.ids_T, tree.positions_T,
        tree.counter_L, inputs.sample_at_L, inputs.sample_slots_L, inputs.sample_start_R1, drawn_L,
        state.last_token if blocked_L is None else blocked_L.view(torch.uint8), out, from_L, from_T, places,
        num_rows, num_samples, width, state.tree.parents.shape[1], len(state.last_token) - 1,
        BLOCKED=blocked_L is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    first_R = inputs.sample_start_R1[:num_rows].long().clamp_max(num_samples - 1)
    return TreePath(out, from_L, from_T, inputs.sample_at_L[first_R], places)


@triton.jit(do_not_specialize=["words", "width"])
def _gather_kernel(addresses, loc, roots, results, places, words, width, WORDS: tl.constexpr):
    base = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    row = tl.program_id(1)
    at = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = at < words
    yields = tl.load(results + row * (width + 1))
    root = tl.load(roots + row)
    # In their order: a node goes to a place at or before its own, behind those of the nodes before it.
    for place in range(1, yields):
        node = tl.load(places + row * width + place)
        source = tl.load(loc + root + node)
        target = tl.load(loc + root + place)
        if node != place and source >= 0 and target >= 0:
            value = tl.load(base + source * words + at, mask=inside, other=0)
            tl.store(base + target * words + at, value, mask=inside)


@cache
def _addresses(caches: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(caches, dtype=torch.int64, device=device)


def gather_path(caches: Sequence[Tensor], loc_T: Tensor, path: TreePath) -> None:
    by_words: dict[int, list[int]] = {}
    others = []
    for each in caches:
        num_bytes = each.stride(1) * each.element_size()
        if num_bytes % 4 or not each.is_contiguous():
            others.append(each)
        else:
            by_words.setdefault(num_bytes // 4, []).append(each.data_ptr())
    if others:
        reference.gather_path(others, loc_T, path)
    num_rows, width = path.places_RW.shape
    for words, addresses in by_words.items():
        _gather_kernel[(len(addresses), num_rows, cdiv(words, _WORDS))](
            _addresses(tuple(addresses), loc_T.device), loc_T, path.root_R, path.result, path.places_RW, words, width,
            WORDS=_WORDS,
        )  # fmt: skip
