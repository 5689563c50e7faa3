"""KV tensors of ordinary attention: a page holds `page_size` tokens of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer keeps of a token."""

    num_kv_heads: int
    k_dim: int
    v_dim: int


class KVPool:
    """Keys and values of all layers, [pages, page size, kv heads, head width] each. Page 0 takes what padding writes."""

    def __init__(
        self, shapes: Sequence[KVShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape in shapes:
            page = (num_pages, page_size, shape.num_kv_heads)
            self.keys.append(_zeros((*page, shape.k_dim), dtype, device))
            self.values.append(_zeros((*page, shape.v_dim), dtype, device))

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copies whole pages in every layer."""
        for cache in (*self.keys, *self.values):
            cache[target] = cache[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU as fresh pages of the operating system, which take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def kv_bytes_per_token(shapes: Sequence[KVShape], dtype: torch.dtype) -> int:
    return sum(s.num_kv_heads * (s.k_dim + s.v_dim) for s in shapes) * dtype.itemsize
