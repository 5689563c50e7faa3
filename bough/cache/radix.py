"""A radix tree over token keys, cut at page borders: which pages hold the KV of which prefix.

Each node owns the pages of its own span of tokens. Rows lock the node their prefix ends in; a lock counts on the whole
path to the root, so a node without locks has no locked descendant and its pages can be evicted, leaves first. Pages enter
the tree when the step that computes them is committed; if that step fails they are detached: no match finds them any
more, and they are freed when the last row that reads them lets go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from msgspec import Struct, structs

from bough.cache.evict import Key
from bough.cache.pages import PagePool
from bough.core.step import I32, I64


class Node:
    """A span of tokens and its pages. `depth` counts the tokens from the root to the node's end."""

    __slots__ = (
        "born",
        "children",
        "depth",
        "detached",
        "hits",
        "key",
        "last_used",
        "locks",
        "namespace",
        "pages",
        "parent",
        "priority",
        "stamp",
        "step",
    )

    def __init__(self, namespace: str, key: I64, pages: I32, parent: Node | None, tick: int) -> None:
        self.namespace = namespace
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.depth: int = len(key) + (parent.depth if parent is not None else 0)
        self.locks = 0
        self.hits = 0
        self.born = tick
        self.last_used = tick
        self.priority = 0
        self.step = -1
        self.stamp = 0
        self.detached = False

    def __repr__(self) -> str:
        return f"Node(depth={self.depth}, tokens={len(self.key)}, locks={self.locks}, detached={self.detached})"


class Match(Struct, frozen=True):
    """The longest cached prefix of a key. `path` holds the nodes and how many pages of each are covered."""

    num_tokens: int
    path: tuple[tuple[Node, int], ...] = ()
    depth: int = 0
    """Depth of the last node when it was matched."""
    splits: int = -1
    """`RadixTree.splits` when it was matched."""
    tail_page: int = 0
    """If `num_tokens` goes beyond the last full page: the page whose first tokens are those beyond it."""


class Extended(Struct, frozen=True):
    """Where a row stands after `extend`. `switched`: runs of pages that the tree had already, by offset into the tail."""

    node: Node
    switched: tuple[tuple[int, I32], ...] = ()


NO_MATCH = Match(0)
_WORTH_A_COPY = 4
"""A page is copied for a quarter of its tokens, at least."""
_LOOKED_AT = 16
"""Branches among which such a page is looked for."""
_NO_KEY = np.empty(0, np.int64)
_NO_PAGES = np.empty(0, np.int32)


class RadixTree:
    """Maps token prefixes to pages, in namespaces. Frees evicted pages into `pool`."""

    def __init__(self, page_size: int, pool: PagePool, order: Callable[[Node], Key]) -> None:
        self.page_size = page_size
        self.num_cached = 0
        """Pages in the tree, locked or not."""
        self.num_evictable = 0
        """Pages of nodes without locks."""
        self.num_detached = 0
        """Pages of failed steps that rows still read."""
        self.version = 0
        """Changes whenever a match could have another result."""
        self.splits = 0
        self._pool = pool
        self._order = order
        self._roots: dict[str, Node] = {}
        self._heap: list[tuple[Key, int, Node]] = []
        self._stamp = 0
        self._tick = 0
        self._by_step: dict[int, list[Node]] = {}

    # -- reading ----------------------------------------------------------------------------------

    def match_prefix(self, namespace: str, key: I64, limit: int) -> Match:
        """The longest cached prefix of `key[:limit]`, in whole pages. Changes nothing."""
        node = self._roots.get(namespace)
        if node is None:
            return NO_MATCH
        size = self.page_size
        limit -= limit % size
        at = 0
        path = []
        while at < limit:
            child = node.children.get(key[at : at + size].tobytes())
            if child is None:
                break
            common = self._common(child.key, key[at:limit])
            path.append((child, common // size))
            at += common
            if common < len(child.key):
                break
            node = child
        return Match(at, tuple(path), path[-1][0].depth if path else 0, self.splits)

    def lengthen(self, found: Match, namespace: str, key: I64, limit: int) -> Match:
        """The match, going on in a page of the tree that begins with the tokens that follow it: it can be copied.

        Only pages that are computed for certain count, and only where they spare a fair part of a page.
        """
        size, at = self.page_size, found.num_tokens
        wanted = key[at : min(limit, at + size - 1)]  # a whole page would have been matched
        least = max(size // _WORTH_A_COPY, 1)
        if len(wanted) < least:
            return found
        best, page = least - 1, 0
        for node, used in self._next_pages(found, namespace, wanted[:least].tobytes()):
            if node.step in self._by_step:
                continue
            stored = node.key[used * size : used * size + len(wanted)]
            count = _num_equal(stored, wanted)
            if count > best:
                best, page = count, int(node.pages[used])
        return structs.replace(found, num_tokens=at + best, tail_page=page) if page else found

    def _next_pages(self, found: Match, namespace: str, head: bytes) -> Iterator[tuple[Node, int]]:
        """Where the tree goes on behind a match: nodes and which of their pages; of branches, those of the latest few that
        begin with `head`."""
        node = self._roots.get(namespace)
        if found.path:
            node, used = found.path[-1]
            if used < len(node.pages):
                yield node, used
                return
        if node is not None:
            for first, child in islice(reversed(node.children.items()), _LOOKED_AT):
                if first.startswith(head):
                    yield child, 0

    def still_longest(self, found: Match, key: I64, limit: int) -> bool:
        """Would matching again give the same? May say no where it would, never the other way round."""
        if not found.path or found.splits != self.splits:
            return False
        node = found.path[-1][0]
        if node.detached or node.depth != found.depth:
            return False
        at, size = found.num_tokens, self.page_size
        if at < found.depth or at + size > limit:
            return True
        return key[at : at + size].tobytes() not in node.children

    def roots(self) -> list[Node]:
        """One a namespace that has nodes or rows. They hold no tokens."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _common(self, ours: I64, theirs: I64) -> int:
        """Length of the common prefix, in whole pages."""
        n = _num_equal(ours, theirs)
        return n - n % self.page_size

    # -- growing ----------------------------------------------------------------------------------

    def lock(self, namespace: str, key: I64, num_tokens: int, priority: int = 0) -> tuple[Node, I32]:
        """Locks the path of `key[:num_tokens]`, which a match has found, and returns its node and pages."""
        self._tick += 1
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(namespace, _NO_KEY, _NO_PAGES, None, self._tick)
        node.locks += 1
        size = self.page_size
        at = 0
        pages = []
        while at < num_tokens:
            child = node.children[key[at : at + size].tobytes()]
            if at + len(child.key) > num_tokens:
                child = self._split(child, num_tokens - at)
            self._add_lock(child)
            child.hits += 1
            child.last_used = self._tick
            child.priority = max(child.priority, priority)
            pages.append(child.pages)
            at += len(child.key)
            node = child
        return node, np.concatenate(pages) if pages else _NO_PAGES

    def extend(self, node: Node, tail: I64, pages: I32, *, step: int, priority: int = 0) -> Extended:
        """Moves a row's lock from `node` down along `tail` (whole pages), adding what the tree does not have yet.

        Where the path existed already, the tree keeps its own pages and `switched` names them: the caller's pages of
        these places stay the caller's. All other pages become the tree's. `step` computes them; -1: they are computed.
        """
        self._tick += 1
        size = self.page_size
        at = 0
        switched = []
        while at < len(tail):
            first = tail[at : at + size].tobytes()
            child = node.children.get(first)
            if child is None:
                # A view of a prompt's few last tokens would keep all of it.
                child = Node(node.namespace, tail[at:].copy(), pages[at // size :].copy(), node, self._tick)
                child.step = step
                child.locks = 1
                node.children[first] = child
                self.num_cached += len(child.pages)
                self.version += 1
                if step >= 0:
                    self._by_step.setdefault(step, []).append(child)
            else:
                common = self._common(child.key, tail[at:])
                if common < len(child.key):
                    child = self._split(child, common)
                self._add_lock(child)
                switched.append((at // size, child.pages))
            child.last_used = self._tick
            child.priority = max(child.priority, priority)
            at += len(child.key)
            node = child
        return Extended(node, tuple(switched))

    def _add_lock(self, node: Node) -> None:
        if node.locks == 0:
            self.num_evictable -= len(node.pages)
        node.locks += 1

    def _split(self, node: Node, at: int) -> Node:
        """Cuts `node` after `at` tokens. The new upper node is returned; the lower one keeps its identity and its rows."""
        parent = node.parent
        assert parent is not None, "roots have no key to split"
        self.splits += 1
        self.version += 1  # a match names the lower half and counts its pages from the upper one's
        size = self.page_size
        # Each half has its own copy: one may outlive the other.
        upper = Node(node.namespace, node.key[:at].copy(), node.pages[: at // size].copy(), parent, node.born)
        upper.locks = node.locks
        upper.hits = node.hits
        upper.last_used = node.last_used
        upper.priority = node.priority
        upper.step = node.step
        upper.detached = node.detached
        parent.children[upper.key[:size].tobytes()] = upper
        node.key = node.key[at:].copy()
        node.pages = node.pages[at // size :].copy()
        node.parent = upper
        upper.children[node.key[:size].tobytes()] = node
        if node.step in self._by_step:
            self._by_step[node.step].append(upper)
        return upper

    # -- letting go -------------------------------------------------------------------------------

    def unlock(self, node: Node) -> None:
        """Takes one lock off the path from `node` to its root."""
        walk: Node | None = node
        while walk is not None:
            if walk.locks <= 0:
                raise ValueError(f"{walk!r} is not locked")
            walk.locks -= 1
            parent = walk.parent
            if walk.locks == 0:
                self._became_free(walk)
            walk = parent

    def _became_free(self, node: Node) -> None:
        if node.parent is None:
            if not node.children:
                self._roots.pop(node.namespace, None)
        elif node.detached:
            self.num_detached -= len(node.pages)
            self._pool.free(node.pages)
        else:
            self.num_evictable += len(node.pages)
            if not node.children:
                self._offer(node)

    def _offer(self, node: Node) -> None:
        """Puts an unlocked leaf up for eviction. Only a node's latest offer counts."""
        self._stamp += 1
        node.stamp = self._stamp
        heapq.heappush(self._heap, (self._order(node), self._stamp, node))
        if len(self._heap) > 1024 and len(self._heap) > 4 * self.num_evictable:
            self._heap = [offer for offer in self._heap if self._stands(offer)]
            heapq.heapify(self._heap)

    @staticmethod
    def _stands(offer: tuple[Key, int, Node]) -> bool:
        node = offer[2]
        return node.stamp == offer[1] and node.locks == 0 and not node.children and not node.detached

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` pages, least valuable leaves first and from their tails. Returns how many."""
        freed = 0
        while freed < num_pages and self._heap:
            offer = heapq.heappop(self._heap)
            if not self._stands(offer):
                continue
            node = offer[2]
            count = min(len(node.pages), num_pages - freed)
            self._pool.free(node.pages[len(node.pages) - count :])
            self.num_cached -= count
            self.num_evictable -= count
            freed += count
            if count < len(node.pages):
                node.pages = node.pages[: len(node.pages) - count]
                node.key = node.key[: len(node.pages) * self.page_size]
                node.depth -= count * self.page_size
                self._offer(node)
            else:
                self._unlink(node)
        if freed:
            self.version += 1
        return freed

    def _unlink(self, node: Node) -> None:
        """Takes an emptied leaf off its parent, which may become a leaf itself."""
        node.detached = True
        parent = node.parent
        assert parent is not None, "roots hold no pages"
        del parent.children[node.key[: self.page_size].tobytes()]
        if parent.children or parent.locks:
            return
        if parent.parent is None:
            self._roots.pop(parent.namespace, None)
        else:
            self._offer(parent)

    def clear(self) -> None:
        """Forgets everything. No row may hold a lock."""
        if any(root.locks for root in self._roots.values()):
            raise ValueError("the tree can't be cleared while rows read it")
        for node in self.nodes():
            node.detached = True
            self._pool.free(node.pages)
        self.forget()

    def forget(self) -> None:
        """Drops every node without freeing its pages: for `clear`, and for a pool that is rebuilt."""
        self._roots.clear()
        self._heap.clear()
        self._by_step.clear()
        self.num_cached = self.num_evictable = self.num_detached = 0
        self.version += 1
        self.splits += 1

    # -- steps ------------------------------------------------------------------------------------

    def settle(self, step: int) -> None:
        """`step` has computed its pages."""
        self._by_step.pop(step, None)

    def drop_step(self, step: int) -> None:
        """`step` has failed: what it was to compute, and what grew from it, can't be matched any more."""
        for node in self._by_step.pop(step, ()):
            if not node.detached:
                self._detach(node)

    def drop_beyond(self, node: Node, num_tokens: int) -> None:
        """A step failed that computed tokens of `node`'s path after the first `num_tokens`: pages that steps in flight
        were to complete on top of them hold garbage too."""
        top = None
        walk: Node | None = node
        while walk is not None and walk.depth > num_tokens:
            if walk.step in self._by_step:
                top = walk
            walk = walk.parent
        if top is not None and not top.detached:
            self._detach(top)

    def _detach(self, top: Node) -> None:
        parent = top.parent
        assert parent is not None, "roots belong to no step"
        del parent.children[top.key[: self.page_size].tobytes()]
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.detached = True
            self.num_cached -= len(node.pages)
            if node.locks:
                self.num_detached += len(node.pages)
            else:
                self.num_evictable -= len(node.pages)
                self._pool.free(node.pages)
        if not parent.children and not parent.locks:
            if parent.parent is None:
                self._roots.pop(parent.namespace, None)
            else:
                self._offer(parent)
        self.version += 1


def _num_equal(ours: I64, theirs: I64) -> int:
    """Length of the common prefix, in tokens."""
    n = min(len(ours), len(theirs))
    differs = ours[:n] != theirs[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
