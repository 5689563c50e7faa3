"""The ranks' store as torch.distributed calls it, from C++."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from bough.distributed.store import TorchStore
from bough.ipc.store import StoreServer


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer([])
    yield made
    made.close()


def test_clones_reach_the_same_values(server: StoreServer) -> None:
    """NCCL's process groups clone the store that they are given."""
    store = TorchStore(server.local(), 5.0)
    clone = dist.PrefixStore("rank", store).clone()
    gc.collect()
    clone.set("key", "value")
    assert store.get("rank/key") == b"value"
    assert clone.add("number", 3) == 3
    assert clone.check(["key"])
    clone.wait(["key"])
    assert not clone.check(["other"])
