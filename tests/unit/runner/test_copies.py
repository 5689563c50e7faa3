"""Copies of pages through a graph, with a stand-in that runs what the graph would."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bough.kernels.pages import copy_pages
from bough.memory.mha import KVPool, KVShape
from bough.platform import Device
from bough.runner.copies import MOST, PageCopies
from bough.runner.staging import Stages


class Replayed:
    """What a captured graph does: reads the pages that are in its buffer now."""

    def __init__(self, pool: KVPool, pages: torch.Tensor) -> None:
        self.pool, self.pages, self.times = pool, pages, 0

    def replay(self) -> None:
        self.times += 1
        copy_pages(self.pool.stores, self.pages[0], self.pages[1])


@pytest.fixture(params=[0, 8, 4])
def pool(request: pytest.FixtureRequest) -> KVPool:
    shapes, cpu = [KVShape(2, 4, 4), KVShape(1, 8, 6)], torch.device("cpu")
    made = KVPool(shapes, num_pages=64, page_size=4, dtype=torch.float32, device=cpu, code_bits=request.param)
    for cache in made.caches(slice(None)):
        cache.copy_(torch.rand(cache.shape) if cache.is_floating_point() else torch.randint_like(cache, 200))
    return made


def test_what_is_copied_and_when_the_graph_does_it(pool: KVPool) -> None:
    copies = PageCopies(pool)
    stages = Stages(Device("cpu"), 1024)
    pages = copies._pages = torch.full((2, MOST), 63, dtype=torch.int64)
    graph = Replayed(pool, pages)
    copies._graph = graph  # type: ignore[assignment]
    cases = [([3], [9]), ([1, 1, 2], [10, 11, 12]), ([5], [6]), (range(1, 20), range(30, 49)), ([7, 8], [8, 20])]
    replays = [1, 2, 3, 3, 3]
    for (source, target), times in zip(cases, replays, strict=True):
        before = [cache.clone() for cache in pool.caches(slice(None))]
        copies.copy(np.array(source, np.int32), np.array(target, np.int32), stages.take())
        for cache, old in zip(pool.caches(slice(None)), before, strict=True):
            expected = old.clone()
            for come, go in zip(source, target, strict=True):
                expected[go] = old[come]
            assert torch.equal(cache, expected)
        assert graph.times == times


def test_nothing_is_captured_on_a_cpu(pool: KVPool) -> None:
    copies = PageCopies(pool)
    old = pool.keys[0][2].clone()
    copies.copy(np.array([2], np.int32), np.array([5], np.int32), Stages(Device("cpu"), 1024).take())
    assert torch.equal(pool.keys[0][5], old)
