"""The pool and the tree together: what the scheduler plans with and what it changes, with every page accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct, structs

from bough.cache.evict import EVICTION
from bough.cache.fixed import FixedContent, FixedPages
from bough.cache.nodes import NO_MATCH, Extended, Match, Node
from bough.cache.pages import PagePool
from bough.cache.radix import RadixTree
from bough.cache.snapshots import Snapshots
from bough.config.concerns import EvictionPolicy
from bough.core.kv import KvLayout, one_line
from bough.core.messages import plain_namespace
from bough.core.step import I32, I64, Pages


class AccountError(Exception):
    """Pages are lost or have two owners: a bug."""


class KeptTail(Struct, frozen=True, eq=False):
    """Tokens whose full pages are in the tree as long as nothing else needs the memory, and the column after those."""

    namespace: str
    key: I64
    pages: I32
    """Per line: the page that holds the tokens behind the last page border; empty: there are none."""
    step: int = -1
    """Computes the pages; -1: they are computed."""


TailName = tuple[str, str]
"""A namespace without its session, and a request's name in it; or the namespace of a session, and "" for what was joined
there."""


class CacheView(Protocol):
    """What planning may read."""

    @property
    def page_size(self) -> int: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        ...

    @property
    def version(self) -> int:
        """A match stays true while this does not change."""
        ...

    @property
    def enabled(self) -> bool: ...

    def match_prefix(self, namespace: str, key: I64, limit: int, follows: str = "") -> Match:
        """The longest cached prefix of `key[:limit]`, in whole pages; of the kept request `follows` to its last token.
        Changes nothing."""
        ...

    def lengthen(self, found: Match, namespace: str, key: I64, limit: int) -> Match:
        """The match, with the first tokens of a page that can be copied. Changes nothing."""
        ...

    def still_longest(self, found: Match, key: I64, limit: int) -> bool:
        """Would matching again give the same? Cheap; may say no where it would."""
        ...

    def unlocked_columns(self, found: Match) -> list[tuple[int, int, int]]:
        """As `RadixTree.unlocked_columns`."""
        ...

    def find_fixed(self, key: bytes) -> FixedContent | None:
        """Media that cross attention has read before. Changes nothing."""
        ...


class PrefixCache:
    """Owns every page: free, deferred, private to a row, cached in the tree, holding media for cross attention, kept aside
    as the tail of what can be joined or was, or detached with a failed step."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int = 1,
        layout: KvLayout | None = None,
        policy: EvictionPolicy = "lru",
        enabled: bool = True,
        num_snapshots: int | None = None,
    ) -> None:
        """`layout`: None: one line, of pages of `page_size` tokens. `num_snapshots`: places for states; None: no layer keeps
        one."""
        self.layout = layout or one_line(page_size)
        self.page_size = self.layout.page_size
        self.enabled = enabled
        self.pool = PagePool(num_pages)
        self.snapshots = None if num_snapshots is None else Snapshots(num_snapshots)
        self.tree = RadixTree(self.layout, self.pool, EVICTION[policy], self.snapshots)
        self.fixed = FixedPages(self.pool)
        self.num_private = 0
        """Pages that rows hold outside the tree."""
        self.num_repairs = 0
        self.tails: dict[TailName, KeptTail] = {}
        """Oldest first. They go when there are too many, or when their pages are needed."""
        self.num_kept = 0
        """Pages of the tails."""
        self._most_tails = max(8, min(1024, self.pool.total // 16))
        self._num_dropped = 0

    def view(self) -> CacheView:
        return self

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.tree.num_evictable + self.fixed.num_evictable + self.num_kept

    @property
    def num_cached(self) -> int:
        """Pages that requests to come can find."""
        return self.tree.num_cached + self.fixed.num_cached

    @property
    def num_held(self) -> int:
        """Pages that neither are free nor can be found."""
        detached = self.tree.num_detached + self.fixed.num_detached
        return self.num_private + self.num_kept + self.pool.num_deferred + detached

    @property
    def version(self) -> int:
        return self.tree.version + self._num_dropped

    def match_prefix(self, namespace: str, key: I64, limit: int, follows: str = "") -> Match:
        if not self.enabled:
            return NO_MATCH
        found = self.tree.match_prefix(namespace, key, limit) if limit >= self.page_size else NO_MATCH
        if self.snapshots is not None:
            return found
        tail = self.tails.get((plain_namespace(namespace) if follows else namespace, follows))
        # A request that was kept in a session has the session's KV: equal tokens elsewhere have another one.
        if tail is None or tail.namespace != namespace or not len(tail.pages):
            return found
        return self._with_tail(found, tail, key, limit)

    def _with_tail(self, found: Match, tail: KeptTail, key: I64, limit: int) -> Match:
        """A match that ends where a kept context's last page begins goes on in that page."""
        first = (len(tail.key) - 1) // self.page_size * self.page_size
        end = min(len(tail.key), limit, first + self.page_size - 1)
        if found.num_tokens != first or end <= first or not np.array_equal(key[first:end], tail.key[first:end]):
            return found
        return structs.replace(found, num_tokens=end, tail_pages=tail.pages)

    def lengthen(self, found: Match, namespace: str, key: I64, limit: int) -> Match:
        if not self.enabled or found.tail_pages is not None or self.snapshots is not None:
            return found
        return self.tree.lengthen(found, namespace, key, limit)

    def still_longest(self, found: Match, key: I64, limit: int) -> bool:
        return found.tail_pages is None and self.tree.still_longest(found, key, limit)

    def unlocked_columns(self, found: Match) -> list[tuple[int, int, int]]:
        return self.tree.unlocked_columns(found)

    def lock(self, namespace: str, key: I64, num_tokens: int, priority: int = 0) -> tuple[Node, Pages]:
        """Locks a matched prefix for a row, as far as it is in full pages. Returns its node and its pages, 0 in columns of
        windows that the row does not see."""
        return self.tree.lock(namespace, key, num_tokens - num_tokens % self.page_size, priority)

    def alloc(self, count: int) -> I32:
        """Takes pages for rows, evicting what must go. Raises `PoolDry` beyond `num_available`."""
        pages = self._alloc(count)
        self.num_private += count
        return pages

    def _alloc(self, count: int) -> I32:
        """Media that no row reads go first: their embeddings are in a store of their own, from which they are soon written
        again."""
        short = count - self.pool.num_free
        if short > 0:
            short -= self.fixed.evict(short)
        if short > 0:
            self.tree.evict(short)
        while count > self.pool.num_free and self.num_kept:
            self._drop(next(iter(self.tails)))
        return self.pool.alloc(count)

    def find_fixed(self, key: bytes) -> FixedContent | None:
        return self.fixed.find(key)

    def add_fixed(self, key: bytes, num_positions: int, items: tuple[bytes, ...], step: int) -> FixedContent:
        """Takes pages for media that `step` writes, evicting what must go. Raises `PoolDry` beyond `num_available`."""
        shape = (self.layout.fixed_pages, self.layout.fixed_columns(num_positions))
        pages = self._alloc(shape[0] * shape[1]).reshape(shape)
        content = FixedContent(key, pages, num_positions, items, step)
        self.fixed.add(content)
        return content

    def insert(
        self, node: Node, tail: I64, pages: Pages, *, step: int, gone: I32 | Sequence[int] = (), priority: int = 0
    ) -> Extended:
        """Moves a row's lock down along `tail` and its private `pages` into the tree.

        Pages that the tree had already are freed once `step` has settled, or at once if `step` is -1 (nothing in flight
        reads them); the row must switch to `Extended.switched`. `gone`: per window, leading columns that the row does not
        see any more. Without a tree, nothing changes.
        """
        if not self.enabled or len(tail) == 0:
            return Extended(node)
        extended = self.tree.extend(node, tail, pages, gone=gone, step=step, priority=priority)
        self.num_private -= int(np.count_nonzero(pages))
        for at, ours in extended.switched:
            mine = pages[:, at : at + ours.shape[1]]
            double = mine[(mine != ours) & (mine != 0)]
            if step >= 0:
                self.pool.free_after(step, double)
            else:
                self.pool.free(double)
        return extended

    def release(self, node: Node, private: I32, gone: I32 | Sequence[int] = ()) -> None:
        """A row lets go of its path, of the columns of windows that it still sees (from `gone` on), and of its pages
        outside the tree."""
        self.free_private(private)
        self.tree.unlock(node, gone)

    def free_private(self, pages: I32) -> None:
        """A row lets go of pages outside the tree, which no step in flight reads."""
        self.pool.free(pages)
        self.num_private -= len(pages)

    def pass_columns(self, node: Node, window: int, first: int, last: int) -> None:
        """A row does not see columns `first .. last - 1` of a window any more; they are in the tree."""
        self.tree.pass_columns(node, window, first, last)

    def snapshot_of(self, node: Node) -> tuple[int, int]:
        """(where the state behind a node is, the step that writes it). Raises `AccountError` if there is none."""
        if self.snapshots is None or not node.snapshot:
            raise AccountError(f"{node!r} has no state behind it")
        return node.snapshot, self.snapshots.step_of(node)

    def keep(self, name: TailName, tail: KeptTail) -> None:
        """Takes over a tail's pages, which were private, until they are needed elsewhere."""
        self._drop(name)
        self.tails[name] = tail
        self.num_private -= len(tail.pages)
        self.num_kept += len(tail.pages)
        while len(self.tails) > self._most_tails:
            self._drop(next(iter(self.tails)))

    def _drop(self, name: TailName) -> None:
        """Frees a tail's pages. A step that copies them was launched before any step that writes them again."""
        tail = self.tails.pop(name, None)
        if tail is None:
            return
        self._num_dropped += 1
        self.num_kept -= len(tail.pages)
        self.pool.free(tail.pages)

    def settle(self, step: int) -> None:
        """Everything up to `step` has been computed and nothing of it is read any more."""
        self.pool.settle(step)
        self.tree.settle(step)

    def drop_step(self, step: int, items: set[bytes] | None = None) -> None:
        """`step` has failed. Rows whose node is detached, or whose media are lost, read what was never computed. `items`:
        keys of media that it was to compute."""
        self.tree.drop_step(step)
        self.fixed.drop_step(step, items or set())
        for name in [name for name, tail in self.tails.items() if tail.step == step]:
            self._drop(name)

    def drop_beyond(self, node: Node, num_tokens: int) -> None:
        """A row of a failed step has only `num_tokens` tokens: what steps in flight add to its path is dropped as well."""
        self.tree.drop_beyond(node, num_tokens)

    def flush(self) -> int:
        """Forgets all cached prefixes. Returns the number of pages freed."""
        freed = self.tree.num_cached + self.num_kept + self.fixed.clear()
        self.tree.clear()
        for name in list(self.tails):
            self._drop(name)
        return freed

    # -- the account ------------------------------------------------------------------------------

    @property
    def balanced(self) -> bool:
        """free + held + cached == total. Costs nothing."""
        return self.pool.num_free + self.num_held + self.num_cached == self.total

    def check(self, private: I32) -> None:
        """Raises `AccountError` unless every page has exactly one owner. `private`: the pages rows hold outside the tree."""
        nodes = list(self.tree.nodes())
        held = [n.pages[n.pages != 0] for n in nodes]
        cached = np.concatenate(held) if nodes else np.empty(0, np.int32)
        evictable = sum(self.tree.evictable_of(node) for node in nodes)
        kept = [tail.pages for tail in self.tails.values()]
        kept_pages = np.concatenate(kept) if kept else np.empty(0, np.int32)
        contents, fixed_pages = self.fixed.contents(), self.fixed.pages()
        for name, counted, found in (
            ("private", self.num_private, len(private)),
            ("cached", self.tree.num_cached, len(cached)),
            ("kept", self.num_kept, len(kept_pages)),
            ("evictable", self.tree.num_evictable, evictable),
            ("evictable media", self.fixed.num_evictable, sum(c.pages.size for c in contents if not c.users)),
            ("media", self.fixed.num_cached + self.fixed.num_detached, len(fixed_pages)),
            ("all", self.total, self.pool.num_free + self.num_held + self.num_cached),
        ):
            if counted != found:
                raise AccountError(f"{name} pages: counted {counted}, found {found}")
        owners = np.bincount(
            np.concatenate(
                [self.pool.free_pages(), self.pool.deferred_pages(), private, cached, kept_pages, fixed_pages]
            ),
            minlength=self.total + 1,
        )
        if owners[0] or owners.max() > 1 or np.count_nonzero(owners) + self.tree.num_detached != self.total:
            raise AccountError(
                f"pages with two owners: {np.flatnonzero(owners > 1).tolist()}; "
                f"without: {np.flatnonzero(owners[1:] == 0).tolist()} ({self.tree.num_detached} detached)"
            )
        for node in nodes:
            self._check_node(node)
        held_states = [node.snapshot for node in nodes if node.snapshot]
        if self.snapshots is not None and (not self.snapshots.balanced or self.snapshots.num_kept != len(held_states)):
            raise AccountError(f"of {self.snapshots.count} places for states, nodes have {held_states}")

    def _check_node(self, node: Node) -> None:
        columns, layout = node.num_columns, self.layout
        if len(node.key) != columns * self.page_size or node.detached or not columns:
            raise AccountError(f"{node!r} has {columns} columns")
        if node.parent is None or node.depth != node.parent.depth + len(node.key):
            raise AccountError(f"{node!r} does not follow its parent")
        if node.locks < sum(child.locks for child in node.children.values()):
            raise AccountError(f"{node!r} has fewer locks than its children")
        if not node.pages[: layout.growing_pages].all():
            raise AccountError(f"{node!r} lacks pages")
        for window, each in zip(layout.windows, node.held, strict=True):
            there = node.pages[window.pages] != 0
            if (there != there[0]).any():
                raise AccountError(f"{node!r} has columns with pages in some lines of a window")
            if len(each.locks) != columns or (each.locks < 0).any() or (each.locks > node.locks).any():
                raise AccountError(f"{node!r} has locks {each.locks.tolist()} of a window")
            if (~there[0] & (each.locks > 0)).any():
                raise AccountError(f"{node!r} lacks pages that rows see")

    def repair(self) -> bool:
        """With no row alive, starts over with an empty tree if the account is not whole. True if it had to."""
        evictable = self.tree.num_evictable + self.fixed.num_evictable
        whole = self.balanced and self.num_held == self.num_kept and evictable == self.num_cached
        if whole:
            return False
        self.tree.forget()
        self.fixed.forget()
        if self.snapshots is not None:
            self.snapshots.forget()
        self.pool.rebuild(np.empty(0, np.int32))
        self.tails.clear()
        self.num_private = self.num_kept = 0
        self._num_dropped += 1
        self.num_repairs += 1
        return True
