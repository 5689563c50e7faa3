"""Eviction policies of cached prefixes. One function per policy: the smallest key is evicted first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bough.config.concerns import EvictionPolicy
from bough.core.kv import KvLayout

if TYPE_CHECKING:
    from bough.cache.nodes import Node

Key = tuple[int, int]
Order = Callable[["Node", int], Key]
"""Takes a node, and the time of last use of the node or of its pages in the lines of a window."""

SLRU_PROTECTED_HITS = 2
"""Hits from which `slru` protects a prefix, as in SGLang."""


def lru(node: Node, last_used: int) -> Key:
    """Least recently used."""
    return (last_used, node.born)


def lfu(node: Node, last_used: int) -> Key:
    """Least often hit; among equals the least recently used."""
    return (node.hits, last_used)


def slru(node: Node, last_used: int) -> Key:
    """Segmented LRU: least recently used of the prefixes hit less than twice, then of the others. A scan of new
    prefixes does not evict the latter."""
    return (int(node.hits >= SLRU_PROTECTED_HITS), last_used)


def fifo(node: Node, last_used: int) -> Key:
    """Oldest."""
    return (node.born, last_used)


def filo(node: Node, last_used: int) -> Key:
    """Newest first: the oldest prefixes stay."""
    return (-node.born, -last_used)


def mru(node: Node, last_used: int) -> Key:
    """Most recently used: for scans longer than the cache, of which lru would keep no useful part."""
    return (-last_used, -node.born)


def priority(node: Node, last_used: int) -> Key:
    """Lowest request priority first; among equals the least recently used."""
    return (node.priority, last_used)


EVICTION: dict[EvictionPolicy, Order] = {
    "lru": lru,
    "lfu": lfu,
    "slru": slru,
    "fifo": fifo,
    "filo": filo,
    "mru": mru,
    "priority": priority,
}

_FEW = 1024
"""Number of offers that are kept even if they are outdated: removing so few would cost more than they do."""

LEAF = -1
"""In place of a window's index: the node itself, a leaf."""


class EvictionOffer(NamedTuple):
    """Something that can be evicted."""

    node: Node
    kind: int
    """`LEAF`, or the index of the window whose pages they are."""
    is_warm: bool
    """Whether the offer is for all of the node's pages, or only for those that no match is likely to need."""


class Offers:
    """What can be evicted, in order. Only the latest offer of a node, or of its pages in a window, is valid.

    A match that ends at a node needs the node's last columns of a window. Requests may continue where rows end or
    branch; all other columns of windows are *cold*, and are evicted before anything else.
    """

    def __init__(self, order: Order, layout: KvLayout) -> None:
        self._order = order
        self._windows = layout.windows
        self._heap: list[tuple[bool, Key, int, Node, int]] = []
        self._stamp = 0
        self._most = _FEW
        """Number of entries above which outdated ones are removed."""

    def add_leaf(self, node: Node) -> None:
        """Offers a node without locks and children."""
        node.stamp = self._push(True, self._order(node, node.last_used), node, LEAF)

    def add_window(self, node: Node, window: int) -> None:
        """Offers the node's pages in the lines of a window, if there are any that no row sees."""
        held = node.held[window]
        free = np.flatnonzero((node.pages[self._windows[window].pages.start] != 0) & (held.locks == 0))
        if len(free) and not node.detached:
            is_warm = int(free[0]) >= self.cold_columns(node, window)
            held.stamp = self._push(is_warm, self._order(node, held.last_used), node, window)

    def cold_columns(self, node: Node, window: int) -> int:
        """Leading columns of a node that no match is likely to need."""
        columns = node.num_columns
        return columns if len(node.children) == 1 else max(0, columns - self._windows[window].most_columns)

    def take(self) -> EvictionOffer | None:
        """The least valuable."""
        while self._heap:
            is_warm, _, stamp, node, kind = heapq.heappop(self._heap)
            if self._stands(stamp, node, kind):
                return EvictionOffer(node, kind, is_warm)
        return None

    def clear(self) -> None:
        self._heap.clear()

    def _push(self, is_warm: bool, key: Key, node: Node, kind: int) -> int:
        self._stamp += 1
        if len(self._heap) >= self._most:
            self._heap = [entry for entry in self._heap if self._stands(*entry[2:])]
            heapq.heapify(self._heap)
            self._most = max(_FEW, 2 * len(self._heap))
        heapq.heappush(self._heap, (is_warm, key, self._stamp, node, kind))
        return self._stamp

    @staticmethod
    def _stands(stamp: int, node: Node, kind: int) -> bool:
        if node.detached:
            return False
        if kind == LEAF:
            return node.stamp == stamp and node.locks == 0 and not node.children
        return node.held[kind].stamp == stamp
