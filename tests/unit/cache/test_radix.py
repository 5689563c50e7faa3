"""The tree against a dictionary that knows every prefix, over random operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from bough.cache.evict import EVICTION
from bough.cache.nodes import Match, Node
from bough.cache.pages import PagePool, PoolDry
from bough.cache.prefix import KeptTail, PrefixCache

TOTAL = 24


class Row:
    """What the scheduler holds of a row: its lock, its tokens and its pages."""

    def __init__(self, namespace: str, node: Node, tokens: list[int], tree_pages: list[int], own: list[int]) -> None:
        self.namespace = namespace
        self.node = node
        self.tokens = tokens
        self.tree_pages = tree_pages
        self.own = own


class TreeMachine(RuleBasedStateMachine):
    """`truth` maps every cached prefix (namespace, tokens in whole pages) to the page that holds its last page."""

    rows = Bundle("rows")

    @initialize(page_size=st.sampled_from([1, 2, 3]), policy=st.sampled_from(sorted(EVICTION)))
    def start(self, page_size: int, policy: str) -> None:
        self.size = page_size
        self.cache = PrefixCache(num_pages=TOTAL + 1, page_size=page_size, policy=policy)  # type: ignore[arg-type]
        self.truth: dict[tuple[str, tuple[int, ...]], int] = {}
        self.live: list[Row] = []
        self.steps: dict[int, list[tuple[Row, int]]] = {}
        self.step = 0
        self.matches: list[tuple[str, list[int], Match]] = []

    def _known(self, namespace: str, tokens: list[int]) -> list[int]:
        pages = []
        for end in range(self.size, len(tokens) + 1, self.size):
            page = self.truth.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    def _locked(self) -> set[tuple[str, tuple[int, ...]]]:
        return {
            (row.namespace, tuple(row.tokens[:end]))
            for row in self.live
            for end in range(self.size, len(row.tree_pages) * self.size + 1, self.size)
        }

    def _forget_evicted(self) -> None:
        """Eviction takes unlocked prefixes only, and never one under another that stays."""
        gone = []
        for namespace, tokens in self.truth:
            found = self.cache.match_prefix(namespace, np.array(tokens, np.int64), len(tokens))
            if found.num_tokens < len(tokens):
                gone.append((namespace, tokens))
        assert not set(gone) & self._locked()
        for key in gone:
            del self.truth[key]

    @rule(
        target=rows,
        namespace=st.sampled_from(["", "b"]),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        keep=st.integers(0, 4),
    )
    def admit(self, namespace: str, tokens: list[int], keep: int) -> Row:
        key = np.array(tokens, np.int64)
        limit = len(tokens) - 1
        found = self.cache.match_prefix(namespace, key, limit)
        known = self._known(namespace, tokens[:limit])
        assert found.num_tokens == len(known) * self.size
        assert [p for node, used in found.path for p in node.pages[0, :used].tolist()] == known
        self.matches = [*self.matches[-20:], (namespace, tokens, found)]
        use = min(found.num_tokens, keep * self.size)
        node, (pages,) = self.cache.lock(namespace, key, use)
        assert pages.tolist() == known[: use // self.size]
        row = Row(namespace, node, tokens, pages.tolist(), [])
        self.live.append(row)
        return row

    @rule(row=rows, count=st.integers(1, 3))
    def grow(self, row: Row, count: int) -> None:
        """A chunk: pages are allocated, and full ones enter the tree."""
        if row not in self.live or row.node.detached:
            return
        full = len(row.tokens) // self.size
        end = min(full, len(row.tree_pages) + count)
        want = end - len(row.tree_pages)
        if want <= 0:
            return
        if want > self.cache.num_available:
            with pytest.raises(PoolDry):
                self.cache.alloc(want)
            self._forget_evicted()
            return
        pages = self.cache.alloc(want)
        self._forget_evicted()
        first = len(row.tree_pages)
        tail = np.array(row.tokens[first * self.size : end * self.size], np.int64)
        step = self.step
        extended = self.cache.insert(row.node, tail, pages[None], step=step)
        switched = {at + i: int(p) for at, run in extended.switched for i, p in enumerate(run[0])}
        for i, page in enumerate(pages.tolist()):
            prefix = (row.namespace, tuple(row.tokens[: (first + i + 1) * self.size]))
            assert (prefix in self.truth) == (i in switched)
            if i in switched:
                assert self.truth[prefix] == switched[i]
            else:
                self.truth[prefix] = page
        row.node = extended.node
        row.tree_pages += [switched.get(i, page) for i, page in enumerate(pages.tolist())]
        self.steps.setdefault(step, []).append((row, first))

    @rule(row=rows, count=st.integers(1, 2))
    def take(self, row: Row, count: int) -> None:
        """Pages of its own, outside the tree."""
        if row in self.live and count <= self.cache.num_available:
            row.own += self.cache.alloc(count).tolist()
            self._forget_evicted()

    @rule(row=consumes(rows))
    def leave(self, row: Row) -> None:
        if row in self.live:
            self.cache.release(row.node, np.array(row.own, np.int32))
            self.live.remove(row)

    @rule()
    def settle(self) -> None:
        self.cache.settle(self.step)
        self.steps.pop(self.step, None)
        self.step += 1

    @rule()
    def fail(self) -> None:
        """The step fails: what it inserted, and all that grew from it, is gone from the tree."""
        doomed = {
            (row.namespace, tuple(row.tokens[: (first + 1) * self.size]))
            for row, first in self.steps.pop(self.step, [])
        }
        by_step = {id(n) for n in self.cache.tree._by_step.get(self.step, [])}
        lost = {
            key
            for key in self.truth
            if any(
                id(node) in by_step
                for node, _ in self.cache.match_prefix(key[0], np.array(key[1], np.int64), len(key[1])).path
            )
        }
        assert all(any(key[1][: len(d[1])] == d[1] for d in doomed if d[0] == key[0]) for key in lost)
        self.cache.drop_step(self.step)
        for key in lost:
            del self.truth[key]
        self.cache.settle(self.step)
        self.step += 1

    @rule()
    def flush(self) -> None:
        if not self.live:
            self.cache.flush()
            self.truth.clear()
            assert self.cache.pool.num_free + self.cache.pool.num_deferred == TOTAL

    @invariant()
    def pages_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        own = [page for row in self.live for page in row.own]
        self.cache.check(np.array(own, np.int32))
        assert self.cache.balanced
        assert len(set(self.truth.values())) == len(self.truth) == self.cache.tree.num_cached

    @invariant()
    def remembered_matches_are_true(self) -> None:
        for namespace, tokens, found in getattr(self, "matches", []):
            key, limit = np.array(tokens, np.int64), len(tokens) - 1
            if self.cache.still_longest(found, key, limit):
                again = self.cache.match_prefix(namespace, key, limit)
                assert (again.num_tokens, again.path) == (found.num_tokens, found.path)

    @invariant()
    def everything_known_is_found(self) -> None:
        if not hasattr(self, "cache"):
            return
        for (namespace, tokens), page in self.truth.items():
            key = np.array(tokens, np.int64)
            found = self.cache.match_prefix(namespace, key, len(tokens))
            assert found.num_tokens == len(tokens)
            node, used = found.path[-1]
            assert node.pages[0, used - 1] == page


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- single behaviours ----------------------------------------------------------------------------


def _fill(cache: PrefixCache, tokens: list[int], namespace: str = "", priority: int = 0) -> None:
    """Caches a prefix, as a finished request would."""
    key = np.array(tokens, np.int64)
    found = cache.match_prefix(namespace, key, len(tokens))
    node, _ = cache.lock(namespace, key, found.num_tokens, priority)
    rest = key[found.num_tokens :]
    pages = cache.alloc(len(rest) // cache.page_size)
    node = cache.insert(node, rest, pages[None], step=-1, priority=priority).node
    cache.release(node, np.empty(0, np.int32))


def _cached(cache: PrefixCache, tokens: list[int], namespace: str = "") -> int:
    return cache.match_prefix(namespace, np.array(tokens, np.int64), len(tokens)).num_tokens


A, B, C = [1] * 4, [2] * 4, [3] * 4


@pytest.mark.parametrize(
    ("policy", "first_to_go"),
    [("lru", B), ("fifo", A), ("mru", A), ("lfu", C), ("priority", B), ("slru", C), ("filo", C)],
)
def test_policies(policy: str, first_to_go: list[int]) -> None:
    """A is oldest and used last, B is used often but long ago, C is youngest and never used again."""
    cache = PrefixCache(num_pages=13, page_size=1, policy=policy)  # type: ignore[arg-type]
    _fill(cache, A, priority=3)
    _fill(cache, B, priority=1)
    for _ in range(3):
        _fill(cache, B, priority=1)
    _fill(cache, C, priority=2)
    _fill(cache, A, priority=3)
    cache.alloc(4)
    left = {tuple(t): _cached(cache, t) for t in (A, B, C)}
    assert left == {tuple(t): 0 if t == first_to_go else 4 for t in (A, B, C)}


def test_slru_keeps_what_was_hit_twice_through_a_scan() -> None:
    cache = PrefixCache(num_pages=13, page_size=1, policy="slru")
    for _ in range(3):
        _fill(cache, A)
    for _ in range(2):
        _fill(cache, B)
    for scanned in range(10, 20):
        _fill(cache, [scanned] * 4)
    assert (_cached(cache, A), _cached(cache, B)) == (4, 0)


def test_eviction_takes_no_more_than_needed_and_from_the_tail() -> None:
    cache = PrefixCache(num_pages=9, page_size=1)
    _fill(cache, [5, 6, 7, 8, 9, 1, 2, 3])
    cache.alloc(3)
    assert _cached(cache, [5, 6, 7, 8, 9, 1, 2, 3]) == 5


def test_locked_prefixes_stay() -> None:
    cache = PrefixCache(num_pages=9, page_size=2)
    _fill(cache, [1, 2, 3, 4])
    node, pages = cache.lock("", np.array([1, 2, 9, 9], np.int64), 2)
    assert cache.num_available == 7
    cache.alloc(7)
    assert _cached(cache, [1, 2, 3, 4]) == 2
    with pytest.raises(PoolDry):
        cache.alloc(1)
    cache.tree.unlock(node)
    assert cache.num_available == 1
    assert pages.shape == (1, 1)


def test_splits_keep_the_rows_of_both_halves() -> None:
    cache = PrefixCache(num_pages=20, page_size=1)
    _fill(cache, [1, 2, 3, 4, 5, 6])
    long, _ = cache.lock("", np.array([1, 2, 3, 4, 5, 6], np.int64), 6)
    short, pages = cache.lock("", np.array([1, 2, 3], np.int64), 3)
    assert long.depth == 6
    assert short.depth == 3
    assert long.parent is short
    assert (short.locks, long.locks) == (2, 1)
    assert pages.shape == (1, 3)


def test_nodes_keep_no_more_of_a_prompt_than_their_own_tokens() -> None:
    cache = PrefixCache(num_pages=1001, page_size=1)
    for tail in range(20):
        _fill(cache, [*range(500), 1000 + tail, 2000 + tail])
    assert _memory(cache) == 8 * (500 + 20 * 2)


def test_a_prompts_beginning_does_not_keep_its_end() -> None:
    cache = PrefixCache(num_pages=504, page_size=1)
    _fill(cache, list(range(500)))
    _fill(cache, [0, 1, 2, 1000, 1001, 1002])
    assert _memory(cache) == 8 * 503
    cache.alloc(497)
    assert _cached(cache, list(range(500))) == 3
    assert _memory(cache) == 8 * 6


def _memory(cache: PrefixCache) -> int:
    """Bytes that the keys of the tree keep alive."""
    owners = {}
    for node in cache.tree.nodes():
        owner = node.key
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        owners[id(owner)] = owner.nbytes
    return sum(owners.values())


def test_namespaces_vanish_when_empty() -> None:
    cache = PrefixCache(num_pages=20, page_size=1)
    for i in range(50):
        _fill(cache, [1, 2, 3], namespace=str(i))
    assert len(cache.tree._roots) <= 7
    assert cache.balanced


def test_keys_may_be_larger_than_token_ids() -> None:
    cache = PrefixCache(num_pages=20, page_size=2)
    media = [1, 2, (7 << 40) + 1, (7 << 40) + 2, 3, 4]
    _fill(cache, media)
    assert _cached(cache, media) == 6
    assert _cached(cache, [1, 2, (8 << 40) + 1, (7 << 40) + 2, 3, 4]) == 2


def test_disabled_cache_keeps_nothing() -> None:
    cache = PrefixCache(num_pages=20, page_size=2, enabled=False)
    node, _ = cache.lock("", np.array([1, 2, 3, 4], np.int64), 0)
    pages = cache.alloc(2)
    assert cache.insert(node, np.array([1, 2, 3, 4], np.int64), pages[None], step=0).node is node
    assert _cached(cache, [1, 2, 3, 4]) == 0
    cache.release(node, pages)
    assert cache.pool.num_free == 19


def test_pages_wait_for_the_last_step_that_reads_them() -> None:
    pool = PagePool(10)
    pages = pool.alloc(4)
    pool.free_after(3, pages[:2])
    pool.free_after(5, pages[2:])
    pool.settle(2)
    assert (pool.num_free, pool.num_deferred) == (5, 4)
    pool.settle(3)
    assert (pool.num_free, pool.num_deferred) == (7, 2)
    pool.settle(9)
    assert (pool.num_free, pool.num_deferred) == (9, 0)


def test_pool_never_hands_out_page_zero_nor_one_page_twice() -> None:
    pool = PagePool(50)
    pages = np.concatenate([pool.alloc(n) for n in (1, 7, 0, 41)])
    assert sorted(pages.tolist()) == list(range(1, 50))
    with pytest.raises(PoolDry):
        pool.alloc(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="only 0 are out"):
        pool.free(pages[:1])


def test_repair_starts_over() -> None:
    cache = PrefixCache(num_pages=20, page_size=1)
    _fill(cache, [1, 2, 3])
    assert not cache.repair()
    cache.pool.alloc(2)
    assert not cache.balanced
    assert cache.repair()
    assert cache.pool.num_free == 19
    assert cache.num_repairs == 1


def _keys(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


@pytest.mark.parametrize("how", ["needed", "flushed", "replaced", "failed"])
def test_a_match_in_a_kept_page_does_not_outlive_it(how: str) -> None:
    """Requests remember a match together with the version. With the page gone, they would copy what is in it now."""
    cache = PrefixCache(num_pages=9, page_size=4)
    _fill(cache, [1, 2, 3, 4])
    pages = cache.alloc(1)
    cache.keep(("", "r"), KeptTail("", _keys([1, 2, 3, 4, 5, 6]), pages, step=7))
    asked = _keys([1, 2, 3, 4, 5, 6, 8, 8])
    found = cache.match_prefix("", asked, 7, "r")
    assert (found.num_tokens, found.tail_pages) == (6, pages)
    node, _ = cache.lock("", asked, 4)  # the tree itself keeps what it has
    version = cache.version
    if how == "needed":
        cache.alloc(cache.num_available)
    elif how == "failed":
        cache.drop_step(7)
    elif how == "replaced":
        cache.keep(("", "r"), KeptTail("", _keys([1, 2, 3, 4]), pages[:0]))
    else:
        cache.release(node, np.empty(0, np.int32))
        cache.flush()
    assert cache.match_prefix("", asked, 7, "r").tail_pages is None
    assert cache.version != version


def test_pages_that_are_being_computed_are_not_copied() -> None:
    """They hold nothing yet: the step that fills them may come after the one that copies, or fail."""
    cache = PrefixCache(num_pages=9, page_size=4)
    theirs, ours = _keys([1, 2, 3, 4, 5, 6, 7, 8]), _keys([1, 2, 3, 4, 5, 6, 9, 9])
    node, _ = cache.lock("", theirs, 0)
    cache.insert(node, theirs, cache.alloc(2)[None], step=3)
    found = cache.match_prefix("", ours, 7)
    assert found.num_tokens == 4
    assert cache.lengthen(found, "", ours, 7) == found
    cache.settle(3)
    longer = cache.lengthen(found, "", ours, 7)
    assert longer.num_tokens == 6
    assert longer.tail_pages is not None


def test_both_halves_of_a_split_prefix_keep_its_priority() -> None:
    """An urgent prefix that a less urgent request has cut in two stays before others: its beginning as well."""
    cache = PrefixCache(num_pages=7, page_size=1, policy="priority")
    _fill(cache, [1, 2, 3, 4], priority=5)
    _fill(cache, [1, 2], priority=1)
    node, _ = cache.lock("x", _keys([0]), 0)
    cache.release(node, cache.alloc(4))
    assert _cached(cache, [1, 2, 3, 4]) == 2, "its end has gone, its beginning is a leaf"
    _fill(cache, [9, 9], priority=3)
    cache.alloc(4)
    assert _cached(cache, [9, 9]) == 0
    assert _cached(cache, [1, 2]) == 2


def test_a_match_does_not_outlive_its_eviction() -> None:
    """A request that remembers one would read pages that others have by now."""
    cache = PrefixCache(num_pages=5, page_size=1)
    _fill(cache, [1, 2, 3, 4])
    version = cache.version
    cache.alloc(2)
    assert _cached(cache, [1, 2, 3, 4]) == 2
    assert cache.version != version


def test_both_halves_of_a_split_prefix_go_with_the_step_that_failed() -> None:
    """Another request has cut it in two before the step was over: neither half was computed."""
    cache = PrefixCache(num_pages=9, page_size=1)
    key = _keys([1, 2, 3, 4])
    node, _ = cache.lock("", key, 0)
    cache.insert(node, key, cache.alloc(4)[None], step=3)
    cache.lock("", key, 2)
    cache.drop_step(3)
    assert _cached(cache, [1, 2, 3, 4]) == 0


def test_a_kept_page_is_for_those_who_have_its_tokens() -> None:
    cache = PrefixCache(num_pages=9, page_size=4)
    _fill(cache, [1, 2, 3, 4])
    pages = cache.alloc(1)
    cache.keep(("", "r"), KeptTail("", _keys([1, 2, 3, 4, 5, 6]), pages))
    for asked, found in (([5, 6, 8, 8], 6), ([5, 9, 8, 8], 4), ([9, 6, 8, 8], 4)):
        assert cache.match_prefix("", _keys([1, 2, 3, 4, *asked]), 7, "r").num_tokens == found
