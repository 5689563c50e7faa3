"""A radix tree over token keys, cut at page borders: which pages hold the KV of which prefix.

Each node owns the pages of its own span of tokens. Rows lock the node their prefix ends in; a lock counts on the whole
path to the root, so a node without locks has no locked descendant and its pages can be evicted, leaves first. Pages enter
the tree when the step that computes them is committed; if that step fails they are detached: no match finds them any
more, and they are freed when the last row that reads them lets go.

Pages of windows are different in three ways. A row locks only those that it still sees, column by column. Pages that no
row sees can be evicted while the rest of the node stays; their entries become 0. And a row can continue from a prefix
only if all tokens that its next token sees are still there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from msgspec import structs

from bough.cache.evict import LEAF, Offers, Order
from bough.cache.nodes import NO_KEY, NO_MATCH, Extended, Match, Node, WindowHold
from bough.cache.pages import PagePool
from bough.cache.snapshots import Snapshots
from bough.core.kv import KvLayout
from bough.core.step import I32, I64, Bool, Pages

_WORTH_A_COPY = 4
"""A page is copied if at least a quarter of its tokens can be used. With pages of 16 tokens, prompts that continue from
the middle of one compute 2 % fewer tokens than with whole pages only; copying for single tokens spares 0.1 % more
(`benchmarks/scheduler_constants.py`)."""
_LOOKED_AT = 16
"""Maximum number of branches searched for such a page, newest first: bounds the host's time."""


class RadixTree:
    """Maps token prefixes to pages, in namespaces. Frees evicted pages into `pool`."""

    def __init__(self, layout: KvLayout, pool: PagePool, order: Order, snapshots: Snapshots | None = None) -> None:
        """`snapshots`: where layers keep states; None: none do."""
        self.snapshots = snapshots
        self.page_size = layout.page_size
        self.num_cached = 0
        """Pages in the tree, locked or not."""
        self.num_evictable = 0
        """Pages of nodes without locks, and those of windows that no row sees."""
        self.num_detached = 0
        """Pages of failed steps that rows still read."""
        self.version = 0
        """Changes whenever a match could have another result."""
        self.shape = 0
        """Changes whenever a match could have another result although its last node ends where it did."""
        self._layout = layout
        self._growing = layout.growing_pages
        self._windows = layout.windows
        self._no_pages: Pages = np.empty((layout.column_pages, 0), np.int32)
        self._pool = pool
        self._offers = Offers(order, layout)
        self._roots: dict[str, Node] = {}
        self._tick = 0
        self._by_step: dict[int, list[Node]] = {}

    # -- reading ----------------------------------------------------------------------------------

    def match_prefix(self, namespace: str, key: I64, limit: int) -> Match:
        """The longest prefix of `key[:limit]`, in whole pages, that a row can go on from. Changes nothing."""
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
        in_tree = at
        if path and (self._windows or self.snapshots is not None):
            fits = self._fits(path)
            columns = int(fits.nonzero()[0][-1])  # without tokens, none are missing
            in_tree = columns * size
            if self.snapshots is not None:
                columns = _last_state(path, fits)
            at, path = columns * size, _first_columns(path, columns)
        return Match(at, tuple(path), path[-1][0].depth if path else 0, self.shape, in_tree)

    def keep_snapshot(self, node: Node, number: int, step: int) -> None:
        """The state behind a node's last token is at this place, once `step` has run."""
        assert self.snapshots is not None, "layers keep states"
        if self.snapshots.keep(node, number, step):
            self._changed_states()

    def lend_snapshot(self) -> int:
        """Lends a place for a row's state; 0: none is free."""
        assert self.snapshots is not None, "layers keep states"
        number, loser = self.snapshots.lend()
        if loser is not None:
            self._changed_states()
        return number

    def _changed_states(self) -> None:
        self.version += 1
        self.shape += 1

    def _drop_snapshot(self, node: Node) -> None:
        if node.snapshot and self.snapshots is not None:
            self.snapshots.drop(node)
            self._changed_states()

    def _fits(self, path: list[tuple[Node, int]]) -> Bool:
        """Per number of the path's first columns: do windows have all that a token behind them would see?"""
        ends = np.arange(sum(used for _, used in path) + 1, dtype=np.int32)
        fits = np.ones(len(ends), np.bool_)
        for window in self._windows:
            pages = np.concatenate([node.pages[window.pages.start, :used] for node, used in path])
            missing = np.where(pages == 0, ends[:-1], -1)
            last_missing = np.maximum.accumulate(np.concatenate([[-1], missing]))
            fits &= last_missing < window.lifetime.first_needed(ends * np.int32(self.page_size)) // self.page_size
        return fits

    def lengthen(self, found: Match, namespace: str, key: I64, limit: int) -> Match:
        """The match, going on in a page of the tree that begins with the tokens that follow it: it can be copied.

        Only pages that are computed for certain count, and only where they spare a fair part of a page.
        """
        size, at = self.page_size, found.num_tokens
        wanted = key[at : min(limit, at + size - 1)]  # a whole page would have been matched
        least = max(size // _WORTH_A_COPY, 1)
        if len(wanted) < least:
            return found
        best, pages = least - 1, None
        for node, used in self._next_pages(found, namespace, wanted[:least].tobytes()):
            if node.step in self._by_step or not node.pages[:, used].all():
                continue
            stored = node.key[used * size : used * size + len(wanted)]
            count = _num_equal(stored, wanted)
            if count > best:
                best, pages = count, node.pages[:, used].copy()
        return found if pages is None else structs.replace(found, num_tokens=at + best, tail_pages=pages)

    def _next_pages(self, found: Match, namespace: str, head: bytes) -> Iterator[tuple[Node, int]]:
        """Where the tree goes on behind a match: nodes and which of their pages; of branches, those of the latest few that
        begin with `head`."""
        node = self._roots.get(namespace)
        if found.path:
            node, used = found.path[-1]
            if used < node.num_columns:
                yield node, used
                return
        if node is not None:
            for first, child in islice(reversed(node.children.items()), _LOOKED_AT):
                if first.startswith(head):
                    yield child, 0

    def still_longest(self, found: Match, key: I64, limit: int) -> bool:
        """Whether matching again would give the same result. May return False although it would, never the reverse."""
        if not found.path or found.shape != self.shape:
            return False
        node = found.path[-1][0]
        if node.detached or node.depth != found.depth:
            return False
        at, size = found.num_tokens, self.page_size
        if at < found.depth or at + size > limit:
            return True
        return key[at : at + size].tobytes() not in node.children

    def unlocked_columns(self, found: Match) -> list[tuple[int, int, int]]:
        """Columns of windows that nothing locks and that a row would if it went on from the match: address of the node,
        window, column. Nothing for models without windows."""
        if not self._windows:
            return []
        gone = self._layout.gone(found.num_tokens - found.num_tokens % self.page_size).tolist()
        columns = []
        for node, used in found.path:
            first = (node.depth - len(node.key)) // self.page_size
            for at, low in enumerate(gone):
                begin = max(0, low - first)
                free = np.flatnonzero(self._is_free(node, at)[begin:used]) + begin
                columns += [(id(node), at, int(column)) for column in free]
        return columns

    def roots(self) -> list[Node]:
        """One root per namespace that has nodes or rows. Roots hold no tokens."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def evictable_of(self, node: Node) -> int:
        """Pages of a node that count as evictable."""
        pages = self._growing * node.num_columns if node.locks == 0 else 0
        for at, window in enumerate(self._windows):
            pages += window.num_pages * int(np.count_nonzero(self._is_free(node, at)))
        return pages

    def _common(self, ours: I64, theirs: I64) -> int:
        """Length of the common prefix, in whole pages."""
        n = _num_equal(ours, theirs)
        return n - n % self.page_size

    def _num_present(self, pages: Pages) -> int:
        return int(np.count_nonzero(pages)) if self._windows else pages.size

    def _is_free(self, node: Node, window: int) -> Bool:
        """Per column of a node: a page of the window is there, and no row sees it."""
        free: Bool = (node.pages[self._windows[window].pages.start] != 0) & (node.held[window].locks == 0)
        return free

    # -- growing ----------------------------------------------------------------------------------

    def lock(self, namespace: str, key: I64, num_tokens: int, priority: int = 0) -> tuple[Node, Pages]:
        """Locks the path of `key[:num_tokens]`, which a match has found, and of windows the columns that a token behind it
        sees. Returns its node and pages; 0 for columns that are not locked."""
        self._tick += 1
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(namespace, NO_KEY, self._no_pages, None, self._tick)
        node.locks += 1
        size = self.page_size
        gone = self._layout.gone(num_tokens) if self._windows else ()
        at = 0
        pages = []
        while at < num_tokens:
            child = node.children[key[at : at + size].tobytes()]
            if at + len(child.key) > num_tokens:
                child = self._split(child, num_tokens - at)
            self._add_lock(child, gone)
            child.hits += 1
            child.last_used = self._tick
            child.priority = max(child.priority, priority)
            pages.append(child.pages)
            at += len(child.key)
            node = child
        locked: Pages = np.concatenate(pages, axis=1) if pages else self._no_pages
        for window, first in zip(self._windows, gone, strict=True):
            locked[window.pages, :first] = 0
        return node, locked

    def extend(
        self, node: Node, tail: I64, pages: Pages, *, gone: Sequence[int] | I32, step: int, priority: int = 0
    ) -> Extended:
        """Moves a row's lock from `node` down along `tail` (whole pages), adding what the tree does not have yet.

        Where the path existed already, the tree keeps its own pages and `switched` names all that it has now: the caller's
        other pages of these places stay the caller's. Pages that the tree lacked become the tree's. `gone`: per window,
        leading columns that the row does not see any more; pages of the others are not 0. `step` computes the pages; -1:
        they are computed.
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
                child = Node(node.namespace, tail[at:].copy(), pages[:, at // size :].copy(), node, self._tick)
                child.held = tuple(WindowHold(np.zeros(child.num_columns, np.int32), self._tick) for _ in self._windows)
                node.children[first] = child
                self.num_cached += self._num_present(child.pages)
                self.num_evictable += self.evictable_of(child)
                self.version += 1
                self._note_step(child, step)
            else:
                common = self._common(child.key, tail[at:])
                if common < len(child.key):
                    child = self._split(child, common)
                if self._windows:
                    self._fill(child, pages[:, at // size : (at + len(child.key)) // size], step)
                switched.append((at // size, child.pages))
            self._add_lock(child, gone)
            child.last_used = self._tick
            child.priority = max(child.priority, priority)
            at += len(child.key)
            node = child
        return Extended(node, tuple(switched))

    def _fill(self, node: Node, pages: Pages, step: int) -> None:
        """Pages of windows that a node lacks become its own."""
        lacks = (node.pages == 0) & (pages != 0)
        if not lacks.any():
            return
        before = self.evictable_of(node)
        node.pages[lacks] = pages[lacks]
        self.num_cached += int(np.count_nonzero(lacks))
        self.num_evictable += self.evictable_of(node) - before
        self.version += 1
        self.shape += 1
        self._note_step(node, step)

    def _note_step(self, node: Node, step: int) -> None:
        if step >= 0:
            node.step = step
            self._by_step.setdefault(step, []).append(node)

    def _add_lock(self, node: Node, gone: Sequence[int] | I32) -> None:
        if node.locks == 0:
            self.num_evictable -= self._growing * node.num_columns
        node.locks += 1
        first = (node.depth - len(node.key)) // self.page_size
        for at, low in enumerate(gone):
            self._lock_columns(node, at, slice(max(0, int(low) - first), None), 1)

    def _lock_columns(self, node: Node, window: int, columns: slice, by: int) -> None:
        """Adds to the locks of a window's columns."""
        held = node.held[window]
        before = int(np.count_nonzero(self._is_free(node, window)[columns]))
        held.locks[columns] += np.int32(by)
        held.last_used = self._tick
        free = int(np.count_nonzero(self._is_free(node, window)[columns]))
        if (held.locks[columns] < 0).any():
            raise ValueError(f"columns of {node!r} are not locked")
        if node.detached or free == before:
            return
        self.num_evictable += (free - before) * self._windows[window].num_pages
        if free > before:
            self._offers.add_window(node, window)

    def _split(self, node: Node, at: int) -> Node:
        """Cuts `node` after `at` tokens. The new upper node is returned; the lower one keeps its identity and its rows."""
        parent = node.parent
        assert parent is not None, "roots have no key to split"
        self.shape += 1
        self.version += 1  # a match names the lower half and counts its pages from the upper one's
        size, cut = self.page_size, at // self.page_size
        # Each half has its own copy: one may outlive the other.
        upper = Node(node.namespace, node.key[:at].copy(), node.pages[:, :cut].copy(), parent, node.born)
        upper.locks = node.locks
        upper.held = tuple(WindowHold(each.locks[:cut].copy(), each.last_used) for each in node.held)
        upper.hits = node.hits
        upper.last_used = node.last_used
        upper.priority = node.priority
        upper.step = node.step
        upper.detached = node.detached
        parent.children[upper.key[:size].tobytes()] = upper
        node.key = node.key[at:].copy()
        node.pages = node.pages[:, cut:].copy()
        for each in node.held:
            each.locks = each.locks[cut:].copy()
        node.parent = upper
        upper.children[node.key[:size].tobytes()] = node
        if node.step in self._by_step:
            for nodes in self._by_step.values():
                if node in nodes:
                    nodes.append(upper)
        for window in range(len(upper.held)):
            self._offers.add_window(upper, window)
        return upper

    # -- letting go -------------------------------------------------------------------------------

    def unlock(self, node: Node, gone: Sequence[int] | I32 = ()) -> None:
        """Takes one lock off the path from `node` to its root, and off the columns of windows from `gone` on."""
        self._tick += 1
        walk: Node | None = node
        while walk is not None:
            if walk.locks <= 0:
                raise ValueError(f"{walk!r} is not locked")
            walk.locks -= 1
            parent = walk.parent
            if parent is not None:
                first = (walk.depth - len(walk.key)) // self.page_size
                for at, low in enumerate(gone):
                    self._lock_columns(walk, at, slice(max(0, int(low) - first), None), -1)
            if walk.locks == 0:
                self._became_free(walk)
            walk = parent

    def pass_columns(self, node: Node, window: int, first: int, last: int) -> None:
        """A row whose path ends at `node` does not see columns `first .. last - 1` of a window any more."""
        self._tick += 1
        walk: Node | None = node
        while walk is not None and walk.depth > first * self.page_size:
            begin = (walk.depth - len(walk.key)) // self.page_size
            columns = slice(max(first - begin, 0), max(last - begin, 0))
            if columns.start < columns.stop:
                self._lock_columns(walk, window, columns, -1)
            walk = walk.parent

    def _became_free(self, node: Node) -> None:
        if node.parent is None:
            if not node.children:
                self._roots.pop(node.namespace, None)
        elif node.detached:
            self.num_detached -= self._num_present(node.pages)
            self._free(node.pages)
        else:
            self.num_evictable += self._growing * node.num_columns
            if not node.children:
                self._offers.add_leaf(node)

    def _free(self, pages: Pages) -> int:
        """Gives pages back to the pool. Returns how many."""
        there = pages[pages != 0] if self._windows else pages.ravel()
        self._pool.free(there)
        return len(there)

    def evict(self, num_pages: int) -> int:
        """Frees `num_pages` pages or a few more, least valuable first: of windows what no row sees and no match is likely to
        end behind, then that and leaves, from their tails, as they were used. Returns how many."""
        freed = 0
        while freed < num_pages:
            offer = self._offers.take()
            if offer is None:
                break
            wanted = num_pages - freed
            freed += self._evict_leaf(offer.node, wanted) if offer.kind == LEAF else self._evict_columns(*offer, wanted)
        if freed:
            self.version += 1
        return freed

    def _evict_leaf(self, node: Node, wanted: int) -> int:
        self._drop_snapshot(node)
        lines, columns = node.pages.shape
        count = min(columns, -(-wanted // max(1, lines)))
        left = columns - count
        freed = self._free(node.pages[:, left:])
        self.num_cached -= freed
        self.num_evictable -= freed
        if left:
            node.pages = node.pages[:, :left]
            node.key = node.key[: left * self.page_size]
            node.depth -= count * self.page_size
            for each in node.held:
                each.locks = each.locks[:left]
            self._offers.add_leaf(node)
        else:
            self._unlink(node)
        return freed

    def _evict_columns(self, node: Node, window: int, is_warm: bool, wanted: int) -> int:
        """Of a node's pages in the lines of a window, those in front first: what a match at the node's end needs goes
        last."""
        lines = self._windows[window].pages
        free = np.flatnonzero(self._is_free(node, window))
        if not is_warm:
            free = free[free < self._offers.cold_columns(node, window)]
        columns = free[: -(-wanted // self._windows[window].num_pages)]
        pages = node.pages[lines, columns]
        self._pool.free(pages.ravel())
        node.pages[lines, columns] = 0
        self.num_cached -= pages.size
        self.num_evictable -= pages.size
        self.shape += 1
        self._offers.add_window(node, window)
        if not node.locks and not node.children and self._is_empty(node):
            self._unlink(node)
        return pages.size

    def _unlink(self, node: Node) -> None:
        """Takes an emptied leaf off its parent, which may become a leaf itself, and goes too if windows have left it
        empty."""
        while True:
            node.detached = True
            self._drop_snapshot(node)
            parent = node.parent
            assert parent is not None, "roots hold no pages"
            del parent.children[node.key[: self.page_size].tobytes()]
            if parent.children or parent.locks:
                return
            if parent.parent is None:
                self._roots.pop(parent.namespace, None)
                return
            if not self._is_empty(parent):
                self._offers.add_leaf(parent)
                return
            node = parent

    def _is_empty(self, node: Node) -> bool:
        return not self._growing and not node.pages.any()

    def clear(self) -> None:
        """Removes everything. No row may hold a lock."""
        if any(root.locks for root in self._roots.values()):
            raise ValueError("the tree can't be cleared while rows read it")
        for node in self.nodes():
            node.detached = True
            self._drop_snapshot(node)
            self._free(node.pages)
        self.forget()

    def forget(self) -> None:
        """Drops every node without freeing its pages: for `clear`, and for a pool that is rebuilt."""
        self._roots.clear()
        self._offers.clear()
        self._by_step.clear()
        self.num_cached = self.num_evictable = self.num_detached = 0
        self.version += 1
        self.shape += 1

    # -- steps ------------------------------------------------------------------------------------

    def settle(self, step: int) -> None:
        """`step` has computed its pages."""
        self._by_step.pop(step, None)

    def drop_step(self, step: int) -> None:
        """`step` has failed: what it was to compute, and what grew from it, can't be matched any more."""
        if self.snapshots is not None and self.snapshots.drop_since(step):
            self._changed_states()
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
            self.num_evictable -= self.evictable_of(node)
            node.detached = True
            self._drop_snapshot(node)
            pages = self._num_present(node.pages)
            self.num_cached -= pages
            if node.locks:
                self.num_detached += pages
            else:
                self._free(node.pages)
        if not parent.children and not parent.locks:
            if parent.parent is None:
                self._roots.pop(parent.namespace, None)
            else:
                self._offers.add_leaf(parent)
        self.version += 1


def _last_state(path: list[tuple[Node, int]], fits: Bool) -> int:
    """Columns of the path up to the last node behind which there is a snapshot, and what windows see (`fits`)."""
    columns = best = 0
    for node, used in path:
        columns += used
        if node.snapshot and used == node.num_columns and fits[columns]:
            best = columns
    return best


def _first_columns(path: list[tuple[Node, int]], columns: int) -> list[tuple[Node, int]]:
    """The path, cut behind its first columns."""
    kept = []
    for node, used in path:
        if columns <= 0:
            break
        kept.append((node, min(used, columns)))
        columns -= used
    return kept


def _num_equal(ours: I64, theirs: I64) -> int:
    """Length of the common prefix, in tokens."""
    n = min(len(ours), len(theirs))
    differs = ours[:n] != theirs[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
