"""Which cached prefix goes first when memory is needed. One function a policy: the smallest key is evicted first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bough.config.concerns import EvictionPolicy

if TYPE_CHECKING:
    from bough.cache.radix import Node

Key = tuple[int, int]


def lru(node: Node) -> Key:
    """Least recently used."""
    return (node.last_used, node.born)


def lfu(node: Node) -> Key:
    """Least often hit; among equals the least recently used."""
    return (node.hits, node.last_used)


def fifo(node: Node) -> Key:
    """Oldest."""
    return (node.born, node.last_used)


def mru(node: Node) -> Key:
    """Most recently used: for scans longer than the cache, of which lru would keep nothing."""
    return (-node.last_used, -node.born)


def priority(node: Node) -> Key:
    """Least urgent request's; among equals the least recently used."""
    return (node.priority, node.last_used)


EVICTION: dict[EvictionPolicy, Callable[[Node], Key]] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "mru": mru,
    "priority": priority,
}
