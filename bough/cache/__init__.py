"""The prefix cache: the page pool, the radix tree over token prefixes, and eviction.

in: token keys, page counts, step numbers. out: page numbers. never: torch, KV tensors, or requests.
"""

from bough.cache.nodes import Match, Node
from bough.cache.pages import PagePool, PoolDry
from bough.cache.prefix import AccountError, CacheView, PrefixCache
from bough.cache.radix import RadixTree

__all__ = ["AccountError", "CacheView", "Match", "Node", "PagePool", "PoolDry", "PrefixCache", "RadixTree"]
