"""Attention on the CPU, compiled and in plain torch, against the row-by-row reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from random_trees import path_to, tree_mask
from torch import Tensor

from bough.core.kv import Window
from bough.kernels.attention import AttentionInputs, AttentionSpec, HostLengths, SpanTensors, reference, torch_backend
from bough.kernels.attention.cpu import CpuAttention, available
from bough.kernels.attention.inputs import Lines
from bough.kernels.attention.torch_backend import TorchAttention, group_rows
from bough.kernels.kv_codes import Ranges, encode
from tests.covers import cover

BACKENDS = [TorchAttention, pytest.param(CpuAttention, marks=pytest.mark.skipif(not available(), reason="no compiler"))]


@dataclass(frozen=True)
class Spec(AttentionSpec):
    layer: int = 0
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    scale: float = 0.125


@dataclass
class Case:
    inputs: AttentionInputs
    q: Tensor
    k: Tensor
    v: Tensor


def make_case(
    rows: list[tuple[int, int]],
    spec: Spec,
    *,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    padding: int = 0,
    share: int = 0,
    host: bool = False,
    seed: int = 0,
    bits: int = 0,
) -> Case:
    """Rows of (queries, context). `share`: leading tokens whose pages the rows of context > share have in common."""
    generator = torch.Generator().manual_seed(seed)
    num_query = np.array([q for q, _ in rows], np.int32)
    context = np.array([c for _, c in rows], np.int32)
    kv_len = num_query + context
    per_row = int(-(-kv_len.max() // page_size)) + 1
    num_pages = len(rows) * per_row + 1
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).to(torch.int32)
    table = free[: len(rows) * per_row].view(len(rows), per_row).clone()
    members = [r for r, (_, c) in enumerate(rows) if share and c > share]
    for row in members[1:]:
        table[row, : share // page_size] = table[members[0], : share // page_size]
    order = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]
    page_table = torch.zeros(len(rows) + 2, per_row, dtype=torch.int32)
    page_table[order] = table
    positions = np.concatenate([np.arange(c, c + q) for q, c in rows])
    owner = np.repeat(np.arange(len(rows)), num_query)
    loc = table[owner, positions // page_size].long() * page_size + torch.from_numpy(positions % page_size)
    loc = torch.cat((loc, torch.full((padding,), -1)))
    v_dim = spec.v_head_dim or spec.head_dim
    make = lambda *shape: torch.randn(*shape, generator=generator)
    cache_dtype = cache_dtype or dtype
    k_cache = make(num_pages, page_size, spec.num_kv_heads, spec.head_dim).to(cache_dtype)
    v_cache = make(num_pages, page_size, spec.num_kv_heads, v_dim).to(cache_dtype)
    ranges = []
    if bits:
        (k_cache, k_ranges), (v_cache, v_ranges) = encode(k_cache, bits), encode(v_cache, bits)
        ranges = [Ranges(k_ranges, v_ranges)]
    tokens = len(positions) + padding
    starts = torch.tensor(np.concatenate(([0], np.cumsum(num_query))), dtype=torch.int32)
    shared = None
    if share:
        shared = SpanTensors(
            rows_M=torch.tensor([*members, 0, 0], dtype=torch.int32),
            start_S1=torch.tensor([0, len(members), len(members)], dtype=torch.int32),
            first_S=torch.zeros(2, dtype=torch.int32),
            last_S=torch.tensor([share, 0], dtype=torch.int32),
            level_S=torch.zeros(2, dtype=torch.int32),
            levels=1,
            num_tokens=tokens,
        )
    inputs = AttentionInputs(
        query_start_R1=starts,
        kv_len_R=torch.from_numpy(kv_len),
        slots_R=order.to(torch.int32),
        page_table=page_table,
        loc_T=loc,
        page_size=page_size,
        max_query=int(num_query.max()),
        max_kv=int(kv_len.max()),
        k_caches=[k_cache],
        v_caches=[v_cache],
        ranges=ranges,
        shared=shared,
        host=HostLengths(num_query, context) if host else None,
    )
    heads = spec.num_heads + spec.num_kv_heads
    fused = make(tokens, heads * spec.head_dim + spec.num_kv_heads * v_dim).to(dtype)
    q, k, v = fused.split(
        (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * v_dim), 1
    )
    return Case(
        inputs,
        q.unflatten(1, (-1, spec.head_dim)),
        k.unflatten(1, (-1, spec.head_dim)),
        v.unflatten(1, (-1, v_dim)),
    )


def check(case: Case, spec: Spec, backend: type, tolerance: float = 2e-5) -> None:
    caches = [c.clone() for c in (*case.inputs.k_caches, *case.inputs.v_caches)]
    ranges = [Ranges(*(each.clone() for each in pair)) for pair in case.inputs.ranges]
    aside = replace(case.inputs, k_caches=[caches[0]], v_caches=[caches[1]], ranges=ranges, shared=None)
    expected = reference.forward(spec, aside, case.q, case.k, case.v)
    actual = backend(case.inputs).forward(spec, case.q, case.k, case.v)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.equal(case.inputs.k_caches[0], caches[0]), "keys were written elsewhere"
    assert torch.equal(case.inputs.v_caches[0], caches[1])
    for ours, theirs in zip(case.inputs.ranges, ranges, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bits", "options", "more"),
    [
        (8, {}, {}),
        (4, {}, {}),
        (8, {"window": 21, "softcap": 4.0}, {"padding": 3}),
        (4, {"chunk": 32, "v_head_dim": 32}, {"dtype": torch.bfloat16}),
        (8, {}, {"share": 64, "page_size": 16}),
        (4, {"num_heads": 24}, {"share": 128, "page_size": 16, "dtype": torch.float16}),
        (4, {"head_dim": 48, "v_head_dim": 16}, {}),
        (8, {"head_dim": 20}, {}),
    ],
)
def test_caches_of_codes(backend: type, bits: int, options: dict[str, Any], more: dict[str, Any]) -> None:
    """Codes, ranges and results are the reference's: in decodes, extends, prompts and shared spans."""
    rows = [(1, 200), (1, 140), (1, 131), (7, 0), (33, 40), (2, 64), (1, 0)]
    rows += [] if "share" in more else [(90, 130)]  # rows of several queries share nothing
    spec = Spec(**options)
    case = make_case(rows, spec, bits=bits, host=backend is TorchAttention, **more)
    check(case, spec, backend, 2e-5 if case.q.dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_behind_windows_are_not_read(backend: type) -> None:
    """Their pages are other rows' by then: ranges there may be no numbers."""
    rows, spec = [(1, 9), (1, 200), (33, 40), (90, 130)], Spec(window=13)
    case = make_case(rows, spec, bits=8, host=True)
    expected = reference.forward(spec, case.inputs, case.q, case.k, case.v)
    for slot, (_, context) in zip(case.inputs.slots_R.tolist(), rows, strict=True):
        pages = case.inputs.page_table[slot, : Window(13).first_needed(context) // case.inputs.page_size].long()
        for each in case.inputs.ranges[0]:
            each[pages] = -1
    actual = backend(case.inputs).forward(spec, case.q, case.k, case.v)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["window", "chunk", "window and slopes"])
def test_pages_behind_windows_are_not_read(backend: type, kind: str) -> None:
    """They are other rows' by then, or hold what isn't a number."""
    rows = [(1, 9), (1, 200), (7, 0), (33, 40), (2, 64), (90, 130), (1, 17)]
    slopes = torch.tensor([0.1, 0.2, 0.0, 0.3]) if kind.endswith("slopes") else None
    bound = {"chunk": 13} if kind == "chunk" else {"window": 13}
    spec = Spec(layer=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.3, slopes=slopes, **bound)
    case = make_case(rows, spec, host=True)
    expected = reference.forward(spec, case.inputs, case.q, case.k, case.v)
    window, table = Window(13, chunked=kind == "chunk"), case.inputs.page_table
    for slot, (_, context) in zip(case.inputs.slots_R.tolist(), rows, strict=True):
        pages = table[slot, : window.first_needed(context) // case.inputs.page_size].long()
        for cache in (*case.inputs.k_caches, *case.inputs.v_caches):
            cache[pages] = float("nan")
    actual = backend(case.inputs).forward(spec, case.q, case.k, case.v)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_other_lines_have_pages_of_their_own(backend: type) -> None:
    """A second layer reads through another table, in pages of another size."""
    rows, first = [(1, 9), (5, 30), (17, 0)], Spec(layer=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.3)
    second = replace(first, layer=1, num_heads=8, num_kv_heads=4)
    one, other = make_case(rows, first, seed=1), make_case(rows, second, page_size=2, seed=2)
    other.inputs.page_table[one.inputs.slots_R.long()] = other.inputs.page_table[other.inputs.slots_R.long()].clone()
    lines = Lines(
        of_layer=(0, 1),
        tables=(one.inputs.page_table, other.inputs.page_table),
        locs=(one.inputs.loc_T, other.inputs.loc_T),
        page_sizes=(4, 2),
    )
    both = replace(
        one.inputs,
        k_caches=[*one.inputs.k_caches, *other.inputs.k_caches],
        v_caches=[*one.inputs.v_caches, *other.inputs.v_caches],
        lines=lines,
    )
    ran = backend(both)
    for case, spec in ((one, first), (other, second)):
        alone = replace(case.inputs, slots_R=one.inputs.slots_R)
        caches = [c.clone() for c in (*alone.k_caches, *alone.v_caches)]
        aside = replace(alone, k_caches=[caches[0]], v_caches=[caches[1]])
        expected = reference.forward(replace(spec, layer=0), aside, case.q, case.k, case.v)
        torch.testing.assert_close(ran.forward(spec, case.q, case.k, case.v), expected, atol=2e-5, rtol=2e-5)


SHAPES = {
    "one decode": [(1, 37)],
    "first token": [(1, 0)],
    "decodes": [(1, 5), (1, 300), (1, 0), (1, 64), (1, 63), (1, 127)],
    "prompt": [(150, 0)],
    "chunk": [(40, 131)],
    "mixed": [(1, 9), (1, 200), (7, 0), (33, 12), (2, 64), (90, 3), (1, 1)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_ragged_batches(backend: type, rows: list[tuple[int, int]], page_size: int) -> None:
    check(make_case(rows, Spec(), page_size=page_size), Spec(), backend)


VARIANTS = {
    "window": Spec(window=16),
    "window longer than all": Spec(window=1000),
    "softcap": Spec(softcap=3.0),
    "both": Spec(window=70, softcap=5.0),
    "chunk": Spec(chunk=37),
    "sinks": Spec(sinks=torch.linspace(-2.0, 8.0, 6)),
    "slopes": Spec(slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.02])),
    "one head each": Spec(num_heads=3, num_kv_heads=3),
    "one kv head": Spec(num_heads=16, num_kv_heads=1, head_dim=32),
    "width 128": Spec(num_heads=4, num_kv_heads=2, head_dim=128, scale=0.09),
    "width 80": Spec(head_dim=80),
    "width 24": Spec(head_dim=24),
    "narrow values": Spec(head_dim=96, v_head_dim=64),
    "encoder": Spec(causal=False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_layer_kinds(backend: type, spec: Spec) -> None:
    check(make_case(SHAPES["mixed"], spec), spec, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.bfloat16, 3e-2),
        (torch.float16, torch.float16, 4e-3),
        (torch.float32, torch.bfloat16, 2e-5),
        (torch.float32, torch.float16, 2e-5),
        (torch.bfloat16, torch.float32, 3e-2),
        (torch.bfloat16, torch.float8_e4m3fn, 6e-2),
    ],
)
def test_dtypes(backend: type, dtype: torch.dtype, cache_dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(SHAPES["mixed"], Spec(), dtype=dtype, cache_dtype=cache_dtype)
    if cache_dtype.itemsize == 1:
        case.inputs.k_scales, case.inputs.v_scales = [0.5], [0.25]
        caches = [c.view(torch.uint8).clone().view(cache_dtype) for c in (*case.inputs.k_caches, *case.inputs.v_caches)]
        aside = replace(case.inputs, k_caches=[caches[0]], v_caches=[caches[1]])
        expected = reference.forward(Spec(), aside, case.q, case.k, case.v)
        actual = backend(case.inputs).forward(Spec(), case.q, case.k, case.v)
        torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)
    else:
        check(case, Spec(), backend, tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("host", [False, True])
def test_padding_is_zero_and_written_nowhere(backend: type, host: bool) -> None:
    case = make_case(SHAPES["mixed"], Spec(), padding=5, host=host)
    check(case, Spec(), backend)
    out = backend(case.inputs).forward(Spec(), case.q, case.k, case.v)
    assert torch.count_nonzero(out[-5:]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "spec",
    [
        Spec(),
        Spec(window=40),
        Spec(softcap=4.0),
        Spec(num_heads=24, num_kv_heads=2),
        Spec(sinks=torch.linspace(-2.0, 8.0, 6), slopes=torch.linspace(0.01, 0.3, 6)),
        Spec(chunk=50),
    ],
)
def test_shared_spans_change_nothing(backend: type, spec: Spec) -> None:
    rows = [(1, 150), (1, 129), (1, 3), (1, 170), (20, 0), (1, 200)]
    check(make_case(rows, spec, share=128), spec, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_threads(backend: type) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            check(make_case([(1, 700), (1, 1000)], Spec()), Spec(), backend)
            check(make_case([(200, 30)], Spec()), Spec(), backend)
            check(make_case([(1, 300), (1, 290), (1, 260)], Spec(), share=256), Spec(), backend)
    finally:
        torch.set_num_threads(before)


def test_similar_rows_are_grouped_and_padding_at_most_doubles() -> None:
    rng = np.random.default_rng(0)
    num_query = rng.integers(0, 200, 64).astype(np.int32)
    kv_len = num_query + rng.integers(0, 2000, 64).astype(np.int32)
    groups = list(group_rows(num_query, kv_len))
    assert sorted(np.concatenate(groups).tolist()) == np.flatnonzero(num_query).tolist()
    for rows in groups:
        assert num_query[rows].max() <= 2 * num_query[rows].min()
        assert np.maximum(kv_len[rows], 32).max() <= 2 * np.maximum(kv_len[rows], 32).min()
    assert len(groups) < 30


@pytest.mark.parametrize(
    ("spec", "most"),
    cover(
        {"plain": Spec(), "window": Spec(window=9), "softcap": Spec(softcap=20.0)},
        {"one": (1, 1), "few": (300, 60), "many": (4000, 400)},
    ),
)
def test_large_rows_are_attended_in_turns(monkeypatch: pytest.MonkeyPatch, spec: Spec, most: tuple[int, int]) -> None:
    """However few pairs may exist at once."""
    pairs, keys = most
    monkeypatch.setattr(torch_backend, "MAX_PAIRS", pairs)
    monkeypatch.setattr(torch_backend, "MAX_KEYS", keys)
    case = make_case([(1, 70), (1, 66), (50, 0), (41, 30), (45, 20), (3, 100)], spec)
    backend = TorchAttention(case.inputs)
    sizes = [(bucket.tokens_BQ.shape, bucket.loc_BS.shape) for bucket in backend._buckets]
    assert all(tokens.numel() * loc[1] <= max(pairs, tokens[0] * loc[1]) for tokens, loc in sizes)
    assert all(loc.numel() <= keys or loc[0] == 1 for _, loc in sizes)
    check(case, spec, TorchAttention)


TREES = [(6, 20), (1, 9), (64, 70), (2, 0), (90, 3), (17, 61)]


def by_reference(inputs: AttentionInputs) -> Any:
    return SimpleNamespace(forward=lambda spec, q, k, v: reference.forward(spec, inputs, q, k, v))


@pytest.mark.parametrize("backend", [by_reference, *BACKENDS])
@pytest.mark.parametrize("spec", [Spec(), Spec(num_heads=4, head_dim=16, window=70, softcap=20.0)])
def test_nodes_of_a_tree_see_their_path(backend: Any, spec: Spec) -> None:
    """Each as if its path were all that there is."""
    case = make_case(TREES, spec, page_size=4, host=True)
    case.inputs.tree, parents = tree_mask(random.Random(3), TREES, len(case.q))
    out = backend(case.inputs).forward(spec, case.q, case.k, case.v)
    start = 0
    for row, (queries, context) in enumerate(TREES):
        pages = case.inputs.page_table[case.inputs.slots_R[row]]
        k = reference.gather(case.inputs.k_caches[0], pages, context + queries)
        v = reference.gather(case.inputs.v_caches[0], pages, context + queries)
        mine = parents[row]
        for node in range(queries):
            path = list(range(node + 1)) if mine is None else path_to(mine, node)
            keys = [*range(context), *(context + each for each in path)]
            q = case.q[start + node][None]
            alone = reference.attend_row(
                q, k[keys], v[keys], scale=spec.scale, window=spec.window, softcap=spec.softcap
            )
            torch.testing.assert_close(out[start + node], alone.flatten(), atol=2e-5, rtol=2e-5)
        start += queries


def item_gaps(rng: random.Random, rows: list[tuple[int, int]], tokens: int) -> Tensor:
    """For rows of (queries, context): those of an odd number of queries hide some of what comes before from each."""
    gaps = torch.zeros(tokens, 2, dtype=torch.int32)
    start = 0
    for queries, context in rows:
        for place in range(queries if queries % 2 else 0):
            hidden = sorted(rng.choices(range(context + place + 1), k=2))
            gaps[start + place] = torch.tensor(hidden)
        start += queries
    return gaps


GAPS = [(6, 20), (1, 90), (65, 70), (1, 0), (91, 200), (1, 3), (17, 61)]


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("backend", [by_reference, *BACKENDS])
@pytest.mark.parametrize("spec", [Spec(), Spec(num_heads=4, head_dim=16, softcap=20.0)])
def test_tokens_do_not_see_what_is_hidden_from_them(backend: Any, spec: Spec, trees: bool) -> None:
    """As if it were not there, beside rows of which nothing is hidden and rows that are trees."""
    case = make_case(GAPS, spec, page_size=4, host=True)
    case.inputs.gaps_T2 = gaps = item_gaps(random.Random(5), GAPS, len(case.q))
    parents: list[list[int] | None] = [None] * len(GAPS)
    if trees:
        case.inputs.tree, parents = tree_mask(random.Random(3), GAPS, len(case.q))
    out = backend(case.inputs).forward(spec, case.q, case.k, case.v)
    start = 0
    for row, (queries, context) in enumerate(GAPS):
        pages = case.inputs.page_table[case.inputs.slots_R[row]]
        k = reference.gather(case.inputs.k_caches[0], pages, context + queries)
        v = reference.gather(case.inputs.v_caches[0], pages, context + queries)
        mine = parents[row]
        for node in range(queries):
            path = list(range(node + 1)) if mine is None else path_to(mine, node)
            hidden = range(*gaps[start + node].tolist())
            keys = [key for key in (*range(context), *(context + each for each in path)) if key not in hidden]
            q = case.q[start + node][None]
            alone = reference.attend_row(q, k[keys], v[keys], scale=spec.scale, softcap=spec.softcap)
            torch.testing.assert_close(out[start + node], alone.flatten(), atol=2e-5, rtol=2e-5)
        start += queries
