"""Spans of KV that rows read together, against every other way of sharing them."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import assume, given, settings, strategies as st

from bough.cache.nodes import Node
from bough.cache.prefix import PrefixCache
from bough.core.step import SharedSpans, SpanCosts
from bough.scheduler import sharing
from bough.scheduler.sharing import shared_spans

Table = tuple[int, ...]
Span = tuple[int, int, int, list[int]]
"""Level, first and last token, rows."""


def _rows(page_size: int, prompts: list[list[int]]) -> tuple[list[Node], list[Table]]:
    """Rows with these prompts, computed one after the other: their nodes and their pages."""
    cache = PrefixCache(num_pages=4096, page_size=page_size)
    nodes, tables = [], []
    for prompt in prompts:
        key = np.array(prompt[: len(prompt) // page_size * page_size], np.int64)
        found = cache.match_prefix("", key, len(key))
        node, (pages,) = cache.lock("", key, found.num_tokens)
        rest = key[found.num_tokens :]
        own = cache.alloc(len(rest) // page_size)
        node = cache.insert(node, rest, own[None], step=-1).node
        nodes.append(node)
        tables.append((*pages.tolist(), *own.tolist()))
    return nodes, tables


def _plain(shared: SharedSpans | None) -> list[Span]:
    if shared is None:
        return []
    bounds = shared.start.tolist()
    ranges = pairwise(bounds)
    fields = zip(shared.level.tolist(), shared.first.tolist(), shared.last.tolist(), ranges, strict=True)
    return [(level, first, last, shared.rows[a:b].tolist()) for level, first, last, (a, b) in fields]


def _price(spans: list[Span], tables: list[Table], page_size: int, costs: SpanCosts, queries: list[int]) -> float:
    """What attention takes if these spans are shared and everything else is read row by row."""
    covered = [0] * len(tables)
    total = costs.fixed_ns if spans else 0.0
    for _, first, last, rows in spans:
        count = sum(queries[row] for row in rows)
        tiles = -(-count // costs.tile_queries)
        total += (last - first) * max(costs.read_ns, tiles * costs.tile_ns) + costs.span_ns + count * costs.merge_ns
        for row in rows:
            covered[row] = max(covered[row], last)
    for row, table in enumerate(tables):
        reads = -(-queries[row] // costs.row_queries)
        total += (len(table) * page_size - covered[row]) * reads * costs.read_ns
    return total


def _check(spans: list[Span], tables: list[Table], page_size: int, costs: SpanCosts, queries: list[int]) -> None:
    """Spans are what `SharedSpans` promises."""
    reached: dict[int, tuple[int, int]] = {}
    for level, first, last, rows in sorted(spans):
        assert len(rows) > 1
        assert level < costs.levels
        assert first % page_size == last % page_size == 0
        assert len({tables[row][: last // page_size] for row in rows}) == 1, "they read the same pages"
        for row in rows:
            assert reached.get(row, (0, 0)) == (level, first) != (level, last), "level after level, without a gap"
            assert queries[row] <= costs.most_queries
            reached[row] = (level + 1, last)
    assert [span[0] for span in spans] == sorted(span[0] for span in spans)


def _all_ways(tables: list[Table], page_size: int, levels: int) -> list[list[Span]]:
    """Every set of common page prefixes as ends of spans, each for all rows that begin so."""
    prefixes = sorted({table[:n] for table in tables for n in range(1, len(table) + 1)})
    rows_of = {p: [row for row, table in enumerate(tables) if table[: len(p)] == p] for p in prefixes}
    common = [p for p in prefixes if len(rows_of[p]) > 1]
    assume(len(common) <= 9)
    ways = []
    for size in range(len(common) + 1):
        for ends in combinations(common, size):
            spans = []
            for end in ends:
                before = [len(other) for other in ends if other != end and end[: len(other)] == other]
                start = max(before, default=0)
                spans.append((len(before), start * page_size, len(end) * page_size, rows_of[end]))
            if all(span[0] < levels for span in spans):
                ways.append(spans)
    return ways


COSTS = st.builds(
    SpanCosts,
    read_ns=st.just(2.0),
    row_queries=st.sampled_from([1, 3]),
    tile_ns=st.sampled_from([0.0, 1.5, 2.0, 5.0]),
    tile_queries=st.sampled_from([1, 2, 4]),
    span_ns=st.sampled_from([0.0, 3.0]),
    merge_ns=st.sampled_from([0.0, 0.5]),
    fixed_ns=st.sampled_from([0.0, 7.0]),
    levels=st.sampled_from([1, 2, 4]),
)
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=8), min_size=2, max_size=6)


@settings(max_examples=150, deadline=None)
@given(page_size=st.sampled_from([1, 2]), prompts=PROMPTS, costs=COSTS, draft=st.integers(0, 3))
def test_no_other_spans_are_cheaper(page_size: int, prompts: list[list[int]], costs: SpanCosts, draft: int) -> None:
    nodes, tables = _rows(page_size, prompts)
    queries = [1 + row * draft % 5 for row in range(len(prompts))]
    found = _plain(shared_spans(nodes, costs, queries))
    _check(found, tables, page_size, costs, queries)
    best = min(_price(way, tables, page_size, costs, queries) for way in _all_ways(tables, page_size, costs.levels))
    assert _price(found, tables, page_size, costs, queries) == best
    assert best <= _price([], tables, page_size, costs, queries)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=12), max_size=60), levels=st.sampled_from([1, 4])
)
def test_many_rows(prompts: list[list[int]], levels: int) -> None:
    """What is chosen among too many nodes is still right, and never worse than reading row by row."""
    nodes, tables = _rows(1, prompts)
    costs = SpanCosts(tile_ns=0.4, tile_queries=4, span_ns=1.0, merge_ns=0.1, fixed_ns=2.0, levels=levels)
    queries = [1] * len(prompts)
    most, sharing.MOST_CUTS = sharing.MOST_CUTS, 5
    try:
        found = _plain(shared_spans(nodes, costs))
    finally:
        sharing.MOST_CUTS = most
    _check(found, tables, 1, costs, queries)
    assert _price(found, tables, 1, costs, queries) <= _price([], tables, 1, costs, queries)
    if levels == 4:
        everything = shared_spans(nodes, SpanCosts(levels=12))
        distinct = len({table[: n + 1] for table in tables for n in range(len(table))})
        if len(set(nodes)) < sharing.MOST_CUTS:
            assert _price(_plain(everything), tables, 1, SpanCosts(levels=12), queries) == distinct, "each page once"


def _two_levels(system: int, groups: int, own: int, rows: int) -> list[list[int]]:
    heads = [[1] * system + [2 + group] * own for group in range(groups)]
    return [[*head, 100 + i] for head in heads for i in range(rows)]


def test_many_deep_groups_rather_than_one_shallow() -> None:
    """With one level, sixteen groups that save four times as much as one of all rows."""
    nodes, _ = _rows(1, _two_levels(system=10, groups=4, own=9, rows=4))
    found = _plain(shared_spans(nodes, SpanCosts(levels=1)))
    assert found == [(0, 0, 19, [4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3]) for g in range(4)]


def test_both_levels_where_that_is_cheaper() -> None:
    nodes, _ = _rows(1, _two_levels(system=10, groups=4, own=9, rows=4))
    groups = [(1, 10, 19, [4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3]) for g in range(4)]
    assert _plain(shared_spans(nodes, SpanCosts())) == [(0, 0, 10, list(range(16))), *groups]
    dear = SpanCosts(span_ns=20.0, merge_ns=1.0)
    assert _plain(shared_spans(nodes, dear)) == [(0, 0, 19, rows) for *_, rows in groups]
    assert shared_spans(nodes, SpanCosts(fixed_ns=300.0)) is None


def test_rows_with_many_query_tokens_stay_out() -> None:
    nodes, _ = _rows(1, [[1] * 10 + [i] for i in range(3)])
    assert _plain(shared_spans(nodes, SpanCosts(most_queries=4), [1, 5, 4])) == [(0, 0, 10, [0, 2])]
    assert shared_spans(nodes, SpanCosts(most_queries=4), [5, 5, 4]) is None


def test_nothing_to_share() -> None:
    nodes, _ = _rows(1, [[i] * 10 for i in range(3)])
    assert shared_spans(nodes, SpanCosts()) is None
    assert shared_spans([], SpanCosts()) is None
