"""Which cached prefix goes first when memory is needed. One function a policy: the smallest key is evicted first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bough.config.concerns import EvictionPolicy

if TYPE_CHECKING:
    from bough.cache.radix import Node

Key = tuple[int, int]

SLRU_PROTECTED_HITS = 2
"""Hits from which `slru` protects a prefix, as in SGLang."""


def lru(node: Node) -> Key:
    """Least recently used."""
    return (node.last_used, node.born)


def lfu(node: Node) -> Key:
    """Least often hit; among equals the least recently used."""
    return (node.hits, node.last_used)


def slru(node: Node) -> Key:
    """Least recently used of those hit less than twice, then of the others: a scan of new prefixes evicts none of these."""
    return (int(node.hits >= SLRU_PROTECTED_HITS), node.last_used)


def fifo(node: Node) -> Key:
    """Oldest."""
    return (node.born, node.last_used)


def filo(node: Node) -> Key:
    """Youngest: what came first stays."""
    return (-node.born, -node.last_used)


def mru(node: Node) -> Key:
    """Most recently used: for scans longer than the cache, of which lru would keep nothing."""
    return (-node.last_used, -node.born)


def priority(node: Node) -> Key:
    """Least urgent request's; among equals the least recently used."""
    return (node.priority, node.last_used)


EVICTION: dict[EvictionPolicy, Callable[[Node], Key]] = {
    "lru": lru,
    "lfu": lfu,
    "slru": slru,
    "fifo": fifo,
    "filo": filo,
    "mru": mru,
    "priority": priority,
}
