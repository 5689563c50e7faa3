"""Groups of rows that read the same KV, against a search over all page prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from bough.cache.prefix import PrefixCache
from bough.cache.radix import Node
from bough.core.step import SharedSpans
from bough.scheduler.sharing import shared_spans


def _rows(page_size: int, prompts: list[list[int]]) -> tuple[list[Node], list[list[int]]]:
    """Rows with these prompts, computed one after the other: their nodes and their pages."""
    cache = PrefixCache(num_pages=4096, page_size=page_size)
    nodes, tables = [], []
    for prompt in prompts:
        key = np.array(prompt[: len(prompt) // page_size * page_size], np.int64)
        found = cache.match_prefix("", key, len(key))
        node, pages = cache.lock("", key, found.num_tokens)
        rest = key[found.num_tokens :]
        own = cache.alloc(len(rest) // page_size)
        node = cache.insert(node, rest, own, step=-1).node
        nodes.append(node)
        tables.append(pages.tolist() + own.tolist())
    return nodes, tables


def brute_force(
    tables: list[list[int]], page_size: int, min_tokens: int, min_saved: int
) -> list[tuple[int, list[int]]]:
    """Cuts the best group off, again and again, trying every leading run of pages of every row."""
    left = set(range(len(tables)))
    groups = []
    while True:
        best: tuple[int, int, list[int]] | None = None
        for row in left:
            for pages in range(1, len(tables[row]) + 1):
                tokens = pages * page_size
                rows = sorted(r for r in left if tables[r][:pages] == tables[row][:pages])
                saved = (len(rows) - 1) * tokens
                if len(rows) > 1 and tokens >= min_tokens and saved >= min_saved:
                    better = best is None or (saved, tokens, -rows[0]) > (best[0], best[1], -best[2][0])
                    best = (saved, tokens, rows) if better else best
        if best is None:
            return groups
        groups.append((best[1], best[2]))
        left -= set(best[2])


def _plain(shared: SharedSpans | None) -> list[tuple[int, list[int]]]:
    if shared is None:
        return []
    bounds = shared.start.tolist()
    return [(int(t), shared.rows[a:b].tolist()) for t, a, b in zip(shared.num_tokens, bounds, bounds[1:], strict=False)]


def _saved(groups: list[tuple[int, list[int]]]) -> list[int]:
    return [(len(rows) - 1) * tokens for tokens, rows in groups]


@settings(max_examples=200, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 4]),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=14), max_size=10),
    min_tokens=st.sampled_from([1, 4]),
    min_saved=st.sampled_from([1, 8]),
)
def test_against_brute_force(page_size: int, prompts: list[list[int]], min_tokens: int, min_saved: int) -> None:
    nodes, tables = _rows(page_size, prompts)
    found = _plain(shared_spans(nodes, min_tokens, min_saved))
    best = brute_force(tables, page_size, min_tokens, min_saved)
    assert sorted(found) == sorted(best)
    assert _saved(found) == sorted(_saved(found), reverse=True)
    rows = [row for _, group in found for row in group]
    assert len(rows) == len(set(rows))


def test_nested_groups_cut_where_most_is_saved() -> None:
    system, long = [1] * 8, [2] * 40
    prompts = [system + long + [i] for i in (3, 4)] + [system + [i] * 4 for i in (5, 6, 7)]
    nodes, tables = _rows(1, prompts)
    found = _plain(shared_spans(nodes, 1, 1))
    assert found == [(48, [0, 1]), (8, [2, 3, 4])]
    assert found == brute_force(tables, 1, 1, 1)


def test_one_group_for_all_if_that_is_better() -> None:
    prompts = [[1] * 40 + [2, 2, i] for i in (3, 4)] + [[1] * 40 + [i] for i in (5, 6)]
    nodes, _ = _rows(1, prompts)
    assert _plain(shared_spans(nodes, 1, 1)) == [(40, [0, 1, 2, 3])]


def test_thresholds() -> None:
    nodes, _ = _rows(1, [[1] * 10 + [i] for i in range(3)])
    assert _plain(shared_spans(nodes, 10, 20)) == [(10, [0, 1, 2])]
    assert shared_spans(nodes, 11, 1) is None
    assert shared_spans(nodes, 1, 21) is None
    assert shared_spans([], 1, 1) is None
