"""Copies of pages, one cache after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_pages(caches: Sequence[Tensor], source_M: Tensor, target_M: Tensor) -> None:
    for cache in caches:
        flat = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # 8-bit floats can't be indexed
        flat[target_M] = flat[source_M]
