"""Copies of a few pages before a step, captured once: finding every layer's cache takes the host longer than the copies."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bough.core.step import I32
from bough.kernels.pages import copy_pages
from bough.memory.mha import KVPool, are_chained
from bough.runner.capture import capture
from bough.runner.staging import Stage

MOST = 16
"""Pages that the graph copies. Those that a step does not need are page 0 onto itself, which no request uses."""


class PageCopies:
    """Queues copies of whole pages in every layer."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._pages: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        """To be called before the first step, on a device that has graphs."""
        stores = self._pool.stores
        if not stores:
            return
        pages = self._pages = torch.zeros((2, MOST), dtype=torch.int64, device=stores[0].device)
        self._graph, _ = capture(lambda: copy_pages(stores, pages[0], pages[1]))

    def copy(self, source_M: I32, target_M: I32, stage: Stage) -> None:
        """Copies pages; all are read before any is written. `stage`: of the step that they are made for."""
        count = len(source_M)
        if self._graph is None or self._pages is None or count > MOST or are_chained(source_M, target_M):
            self._pool.copy_pages(source_M, target_M)
            return
        room = stage.room(self._pages.nbytes)
        pages = room.array.view(np.int64).reshape(2, MOST)
        pages[0, :count], pages[1, :count], pages[:, count:] = source_M, target_M, 0
        self._pages.copy_(room.tensor.view(torch.int64).view(2, MOST), non_blocking=True)
        self._graph.replay()
