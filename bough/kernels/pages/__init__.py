"""Copies of whole pages between places of many caches.

in: caches of pages (all layers' keys and values), and which page goes where. out: the pages, copied. never: what a page
means.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def copy_pages(caches: Sequence[Tensor], source_M: Tensor, target_M: Tensor) -> None:
    """In each cache, which is contiguous, copies `cache[source[m]]` to `cache[target[m]]`. No page is both. int64 pages."""
    _IMPLEMENTATIONS.pick("copy_pages", source_M.device)(caches, source_M, target_M)
