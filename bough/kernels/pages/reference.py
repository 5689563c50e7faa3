"""Copies of pages, one cache after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_pages(caches: Sequence[Tensor], source_M: Tensor, target_M: Tensor) -> None:
    for cache in caches:
        cache[target_M] = cache[source_M]
