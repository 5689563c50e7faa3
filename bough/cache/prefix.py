"""The pool and the tree together: what the scheduler plans with and what it changes, with every page accounted for."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from bough.cache.evict import EVICTION
from bough.cache.pages import PagePool
from bough.cache.radix import NO_MATCH, Extended, Match, Node, RadixTree
from bough.config.concerns import EvictionPolicy
from bough.core.step import I32, I64


class AccountError(Exception):
    """Pages are lost or have two owners: a bug."""


class CacheView(Protocol):
    """What planning may read."""

    @property
    def page_size(self) -> int: ...

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

    def match_prefix(self, namespace: str, key: I64, limit: int) -> Match:
        """The longest cached prefix of `key[:limit]`, in whole pages. Changes nothing."""
        ...

    def still_longest(self, found: Match, key: I64, limit: int) -> bool:
        """Would matching again give the same? Cheap; may say no where it would."""
        ...


class PrefixCache:
    """Owns every page: free, deferred, private to a row, cached in the tree, or detached with a failed step."""

    def __init__(self, *, num_pages: int, page_size: int, policy: EvictionPolicy = "lru", enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size, self.pool, EVICTION[policy])
        self.num_private = 0
        """Pages that rows hold outside the tree."""
        self.num_repairs = 0

    def view(self) -> CacheView:
        return self

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_held(self) -> int:
        """Pages that neither are free nor in the tree."""
        return self.num_private + self.pool.num_deferred + self.tree.num_detached

    @property
    def version(self) -> int:
        return self.tree.version

    def match_prefix(self, namespace: str, key: I64, limit: int) -> Match:
        if not self.enabled or limit < self.page_size:
            return NO_MATCH
        return self.tree.match_prefix(namespace, key, limit)

    def still_longest(self, found: Match, key: I64, limit: int) -> bool:
        return self.tree.still_longest(found, key, limit)

    def lock(self, namespace: str, key: I64, num_tokens: int, priority: int = 0) -> tuple[Node, I32]:
        """Locks a matched prefix for a row. Returns its node and its pages."""
        return self.tree.lock(namespace, key, num_tokens, priority)

    def alloc(self, count: int) -> I32:
        """Takes pages for rows, evicting what must go. Raises `PoolDry` beyond `num_available`."""
        short = count - self.pool.num_free
        if short > 0:
            self.tree.evict(short)
        pages = self.pool.alloc(count)
        self.num_private += count
        return pages

    def insert(self, node: Node, tail: I64, pages: I32, *, step: int, priority: int = 0) -> Extended:
        """Moves a row's lock down along `tail` and its private `pages` into the tree.

        Pages that the tree had already are freed once `step` has settled, or at once if `step` is -1 (nothing in flight
        reads them); the row must switch to `Extended.switched`. Without a tree, nothing changes.
        """
        if not self.enabled or len(tail) == 0:
            return Extended(node)
        extended = self.tree.extend(node, tail, pages, step=step, priority=priority)
        self.num_private -= len(pages)
        for at, ours in extended.switched:
            double = pages[at : at + len(ours)].copy()
            if step >= 0:
                self.pool.free_after(step, double)
            else:
                self.pool.free(double)
        return extended

    def release(self, node: Node, private: I32) -> None:
        """A row lets go of its path and of its pages outside the tree."""
        self.pool.free(private)
        self.num_private -= len(private)
        self.tree.unlock(node)

    def settle(self, step: int) -> None:
        """Everything up to `step` has been computed and nothing of it is read any more."""
        self.pool.settle(step)
        self.tree.settle(step)

    def drop_step(self, step: int) -> None:
        """`step` has failed. Rows whose node is detached read what was never computed."""
        self.tree.drop_step(step)

    def drop_beyond(self, node: Node, num_tokens: int) -> None:
        """A row of a failed step has only `num_tokens` tokens: what steps in flight add to its path is dropped as well."""
        self.tree.drop_beyond(node, num_tokens)

    def flush(self) -> int:
        """Forgets all cached prefixes. Returns the number of pages freed."""
        cached = self.tree.num_cached
        self.tree.clear()
        return cached

    # -- the account ------------------------------------------------------------------------------

    @property
    def balanced(self) -> bool:
        """free + held + cached == total. Costs nothing."""
        return self.pool.num_free + self.num_held + self.tree.num_cached == self.total

    def check(self, private: I32) -> None:
        """Raises `AccountError` unless every page has exactly one owner. `private`: the pages rows hold outside the tree."""
        nodes = list(self.tree.nodes())
        cached = np.concatenate([n.pages for n in nodes]) if nodes else np.empty(0, np.int32)
        evictable = sum(len(n.pages) for n in nodes if n.locks == 0)
        for name, counted, found in (
            ("private", self.num_private, len(private)),
            ("cached", self.tree.num_cached, len(cached)),
            ("evictable", self.tree.num_evictable, evictable),
            ("all", self.total, self.pool.num_free + self.num_held + self.tree.num_cached),
        ):
            if counted != found:
                raise AccountError(f"{name} pages: counted {counted}, found {found}")
        owners = np.bincount(
            np.concatenate([self.pool.free_pages(), self.pool.deferred_pages(), private, cached]),
            minlength=self.total + 1,
        )
        if owners[0] or owners.max() > 1 or np.count_nonzero(owners) + self.tree.num_detached != self.total:
            raise AccountError(
                f"pages with two owners: {np.flatnonzero(owners > 1).tolist()}; "
                f"without: {np.flatnonzero(owners[1:] == 0).tolist()} ({self.tree.num_detached} detached)"
            )
        for node in nodes:
            if len(node.key) != len(node.pages) * self.page_size or node.detached or not len(node.pages):
                raise AccountError(f"{node!r} has {len(node.pages)} pages")
            if node.parent is None or node.depth != node.parent.depth + len(node.key):
                raise AccountError(f"{node!r} does not follow its parent")
            if node.locks < sum(child.locks for child in node.children.values()):
                raise AccountError(f"{node!r} has fewer locks than its children")

    def repair(self) -> bool:
        """With no row alive, starts over with an empty tree if the account is not whole. True if it had to."""
        whole = self.balanced and self.num_held == 0 and self.tree.num_evictable == self.tree.num_cached
        if whole:
            return False
        self.tree.forget()
        self.pool.rebuild(np.empty(0, np.int32))
        self.num_private = 0
        self.num_repairs += 1
        return True
