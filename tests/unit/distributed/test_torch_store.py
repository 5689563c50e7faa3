"""The ranks' store as torch.distributed calls it, from C++."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bough.distributed.process_group import ProcessGroups
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


def test_collectives_keep_the_store_alive(server: StoreServer) -> None:
    """torch keeps the half in C++ alone: calls of a process group's threads would lead nowhere."""
    made = ProcessGroups(server.local(), 0, 1, torch.device("cpu"), timeout_s=20.0).connect([0])
    try:
        gc.collect()
        store = dist.distributed_c10d._get_default_store()
        store.set("after", "all")
        assert store.get("after") == b"all"
        assert torch.equal(made.all_reduce(torch.ones(3)), torch.ones(3))
    finally:
        dist.destroy_process_group()
