"""Pages of windows and states in the tree, against a walk over all of its nodes that believes nothing but page numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from bough.cache.evict import EVICTION
from bough.cache.nodes import Match, Node
from bough.cache.pages import PoolDry
from bough.cache.prefix import PrefixCache
from bough.core.kv import Grows, KvGroup, KvLayout, Window
from bough.core.step import Pages

ALL = KvGroup(Grows())
LAYOUTS = [
    (ALL, KvGroup(Window(3))),
    (ALL, KvGroup(Window(2)), KvGroup(Window(5), ((), ()))),
    (KvGroup(Window(4)),),
    (ALL, KvGroup(Window(4, chunked=True))),
    (KvGroup(Grows(), parts=2), KvGroup(Window(1))),
]
TOKENS = st.builds(
    lambda length, end: [0] * length + end, st.integers(0, 14), st.lists(st.integers(0, 1), min_size=1, max_size=3)
)
"""Long prefixes are met again, and left anywhere."""
Prefix = tuple[str, tuple[int, ...]]
Columns = dict[Prefix, list[int]]


def columns_of(cache: PrefixCache) -> tuple[Columns, dict[Prefix, int]]:
    """Every prefix of whole columns in the tree, and the pages of its last column; of those behind which there is a state,
    the place of that."""
    found: Columns = {}
    states: dict[Prefix, int] = {}

    def walk(node: Node, before: tuple[int, ...]) -> None:
        for column in range(node.num_columns):
            before += tuple(node.key[column * cache.page_size : (column + 1) * cache.page_size].tolist())
            found[node.namespace, before] = node.pages[:, column].tolist()
        if node.snapshot:
            states[node.namespace, before] = node.snapshot
        for child in node.children.values():
            walk(child, before)

    for root in cache.tree.roots():
        walk(root, ())
    return found, states


def longest(cache: PrefixCache, namespace: str, tokens: list[int], limit: int) -> tuple[int, int]:
    """What `match_prefix` must find: tokens that a row can go on from, and tokens that lack nothing but a state."""
    size, layout = cache.page_size, cache.layout
    columns, states = columns_of(cache)
    path: list[list[int]] = []
    best = in_tree = 0
    for end in range(size, limit + 1, size):
        prefix = namespace, tuple(tokens[:end])
        if prefix not in columns:
            break
        path.append(columns[prefix])
        seen = [range(window.lifetime.first_needed(end) // size, len(path)) for window in layout.windows]
        if all(all(path[column][window.pages]) for window, s in zip(layout.windows, seen, strict=True) for column in s):
            in_tree = end
            best = end if cache.snapshots is None or prefix in states else best
    return best, in_tree


class Row:
    """A row that has computed `length` of its tokens; its columns from the tree's on are its own."""

    def __init__(self, namespace: str, node: Node, tokens: list[int], table: Pages, gone: list[int]) -> None:
        self.namespace = namespace
        self.node = node
        self.tokens = tokens
        self.table = table
        self.tree = table.shape[1]
        self.gone = gone


class WindowMachine(RuleBasedStateMachine):
    rows = Bundle("rows")

    @initialize(
        groups=st.sampled_from(LAYOUTS),
        page_size=st.sampled_from([1, 2]),
        policy=st.sampled_from(sorted(EVICTION)),
        states=st.sampled_from([None, 2, 8]),
    )
    def start(self, groups: tuple[KvGroup, ...], page_size: int, policy: str, states: int | None) -> None:
        self.layout = KvLayout(groups, page_size)
        pages = 14 * self.layout.column_pages + 1
        self.cache = PrefixCache(num_pages=pages, layout=self.layout, policy=policy, num_snapshots=states)  # type: ignore[arg-type]
        self.live: list[Row] = []
        self.matches: list[tuple[str, list[int], int, Match]] = []
        self.written: dict[int, Prefix] = {}
        """By place for a state: of which prefix it holds the state."""
        self.step = 0

    @rule(
        target=rows,
        namespace=st.sampled_from(["", "b"]),
        tokens=TOKENS,
    )
    def admit(self, namespace: str, tokens: list[int]) -> Row:
        key, limit = np.array(tokens, np.int64), len(tokens) - 1
        found = self.cache.match_prefix(namespace, key, limit)
        assert (found.num_tokens, found.in_tree) == longest(self.cache, namespace, tokens, limit)
        self.matches.append((namespace, tokens, limit, found))
        unlocked = self.cache.unlocked_columns(found)
        before = self.cache.tree.num_evictable
        free = sum(self.layout.growing_pages * used for node, used in found.path if node.locks == 0)
        node, pages = self.cache.lock(namespace, key, found.num_tokens)
        free += sum(self.layout.windows[window].num_pages for _, window, _ in unlocked)
        assert before - self.cache.tree.num_evictable == free
        row = Row(namespace, node, tokens, pages, self.layout.gone(found.num_tokens).tolist())
        self.live.append(row)
        return row

    @rule()
    def match_again(self) -> None:
        """A match that is said to be still the longest is what matching again finds."""
        for namespace, tokens, limit, found in self.matches:
            key = np.array(tokens, np.int64)
            if self.cache.still_longest(found, key, limit):
                again = self.cache.match_prefix(namespace, key, limit)
                assert (again.num_tokens, again.path) == (found.num_tokens, found.path)

    @rule(row=rows, count=st.integers(1, 3), saves=st.booleans())
    def grow(self, row: Row, count: int, saves: bool) -> None:
        """A chunk: its columns are allocated, and enter the tree. The state behind it may be saved."""
        size = self.cache.page_size
        first = row.table.shape[1]
        end = min(len(row.tokens) // size, first + count)
        if row not in self.live or row.node.detached or end == first or row.tree < first:
            return
        wanted = (end - first) * self.layout.column_pages
        if wanted > self.cache.num_available:
            with pytest.raises(PoolDry):
                self.cache.alloc(wanted)
            return
        pages = self.cache.alloc(wanted).reshape(self.layout.column_pages, -1)
        tail = np.array(row.tokens[first * size : end * size], np.int64)
        extended = self.cache.insert(row.node, tail, pages, step=self.step, gone=row.gone)
        row.node, row.tree = extended.node, end
        for at, ours in extended.switched:
            pages[:, at : at + ours.shape[1]] = ours
        row.table = np.concatenate([row.table, pages], axis=1)
        if saves and self.cache.snapshots is not None:
            place = self.cache.tree.lend_snapshot()
            had = row.node.snapshot
            self.cache.tree.keep_snapshot(row.node, place, self.step)
            if not had:
                self.written[place] = row.namespace, tuple(row.tokens[: end * size])

    @rule(row=rows)
    def move_on(self, row: Row) -> None:
        """The windows of a row reach its last column."""
        if row not in self.live:
            return
        gone = self.layout.gone(row.table.shape[1] * self.cache.page_size).tolist()
        for at, (first, last) in enumerate(zip(row.gone, gone, strict=True)):
            if last > first:
                self.cache.pass_columns(row.node, at, first, last)
        row.gone = gone

    @rule(namespace=st.sampled_from(["", "b"]), tokens=TOKENS, chunks=st.lists(st.booleans(), min_size=1, max_size=3))
    def serve(self, namespace: str, tokens: list[int], chunks: list[bool]) -> None:
        """A request from its beginning to its end, in chunks, some of which leave their states."""
        row = self.admit(namespace, tokens)
        for saves in chunks:
            self.grow(row, 1 + len(tokens) // len(chunks), saves)
            self.move_on(row)
        self.leave(row)

    @rule(row=consumes(rows))
    def leave(self, row: Row) -> None:
        if row in self.live:
            self.cache.release(row.node, np.empty(0, np.int32), row.gone)
            self.live.remove(row)

    @rule(pages=st.integers(1, 8))
    def need(self, pages: int) -> None:
        """Somebody takes pages and gives them back: things are evicted."""
        pages = min(pages, self.cache.num_available)
        short, before = max(0, pages - self.cache.pool.num_free), self.cache.tree.num_cached
        self.cache.free_private(self.cache.alloc(pages))
        assert short <= before - self.cache.tree.num_cached < short + self.layout.column_pages

    @rule()
    def settle(self) -> None:
        self.cache.settle(self.step)
        self.step += 1

    @rule()
    def fail(self) -> None:
        self.cache.drop_step(self.step)
        self.cache.settle(self.step)
        self.step += 1

    @invariant()
    def pages_balance(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check(np.empty(0, np.int32))

    @invariant()
    def states_stay_behind_their_prefix(self) -> None:
        if hasattr(self, "cache"):
            for prefix, place in columns_of(self.cache)[1].items():
                assert self.written[place] == prefix

    @invariant()
    def rows_have_what_they_see(self) -> None:
        for row in getattr(self, "live", []):
            path, node = [], row.node
            while node is not None:
                path.insert(0, node.pages)
                node = node.parent
            pages = np.concatenate(path, axis=1)
            growing = self.layout.growing_pages
            assert (pages[:growing] == row.table[:growing]).all()
            assert pages[:growing].all()
            for window, gone in zip(self.layout.windows, row.gone, strict=True):
                assert (pages[window.pages, gone:] == row.table[window.pages, gone:]).all()
                assert pages[window.pages, gone:].all()


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


# -- single behaviours ----------------------------------------------------------------------------


def filled(num_pages: int, groups: tuple[KvGroup, ...], *prompts: list[int]) -> PrefixCache:
    """A cache with prompts of single-token pages, as requests leave it that came one after the other."""
    cache = PrefixCache(num_pages=num_pages + 1, layout=KvLayout(groups, 1))
    for tokens in prompts:
        key = np.array(tokens, np.int64)
        found = cache.match_prefix("", key, len(tokens))
        node, _ = cache.lock("", key, found.num_tokens)
        rest = key[found.num_tokens :]
        pages = cache.alloc(len(rest) * cache.layout.column_pages).reshape(-1, len(rest))
        gone = cache.layout.gone(found.num_tokens)
        node = cache.insert(node, rest, pages, step=-1, gone=gone).node
        cache.release(node, np.empty(0, np.int32), gone)
    return cache


def cached(cache: PrefixCache, tokens: list[int]) -> int:
    return cache.match_prefix("", np.array(tokens, np.int64), len(tokens)).num_tokens


BOTH = (ALL, KvGroup(Window(3)))
LONG = list(range(10))


def test_what_no_match_is_likely_to_need_goes_first() -> None:
    cache = filled(20, BOTH, LONG)
    cache.alloc(7)
    assert cached(cache, LONG) == 10, "the last tokens are all there"
    assert cached(cache, LONG[:7]) == 0, "those before are gone"


def test_the_last_window_is_worth_as_much_as_the_rest() -> None:
    """Of two prompts the older one goes, once nothing is left that no match needs."""
    old, new = LONG, [20 + token for token in LONG]
    cache = filled(40, BOTH, old, new)
    cache.alloc(2 * 7 + 5)
    assert cached(cache, new) == 10
    assert cached(cache, old) < 10


def test_rows_that_parted_are_gone_on_from() -> None:
    """Where two prompts part, a third may follow: what it would see stays as long as what others would."""
    cache = filled(40, BOTH, LONG, [*LONG[:6], 50, 51, 52, 53, 54, 55])
    cold = cache.tree.num_cached - 16 - 3 * 3
    cache.alloc(cache.pool.num_free + cold - 4)
    assert cached(cache, [*LONG[:6], 99]) == 6


def test_missing_pages_are_filled_by_the_next_request() -> None:
    cache = filled(40, BOTH, LONG)
    cache.free_private(cache.alloc(27))
    assert cached(cache, LONG[:7]) == 0
    key = np.array(LONG[:7], np.int64)
    node, _ = cache.lock("", key, 0)
    pages = cache.alloc(14).reshape(2, 7)
    extended = cache.insert(node, key, pages, step=5, gone=[0])
    assert extended.node.depth == 7
    assert cached(cache, LONG[:7]) == 7
    assert cache.pool.num_deferred == 7, "the tree had the pages of the other line"
    cache.drop_step(5)
    assert extended.node.detached, "what was filled in was never computed"
    assert cached(cache, LONG) == 0


def test_a_match_may_end_earlier_for_windows() -> None:
    cache = filled(20, BOTH, LONG)
    node, _ = cache.lock("", np.array(LONG, np.int64), 5)
    cache.alloc(cache.num_available)
    assert cached(cache, LONG) == 5
    assert cache.num_available == 0
    cache.tree.unlock(node, cache.layout.gone(5))


def test_windows_alone_leave_nothing_behind() -> None:
    """Nodes whose pages are all gone keep no tokens in memory, once nothing below them has any."""
    cache = filled(20, (KvGroup(Window(3)),), LONG, [*LONG, 11, 12, 13])
    cache.alloc(20)
    assert list(cache.tree.nodes()) == []
    assert cache.tree.roots() == []
