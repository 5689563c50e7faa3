"""NCCL with one rank: our collectives eagerly and in a captured graph, beside its watchdog. Less than a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from bough.distributed.process_group import GroupCollectives, ProcessGroups
from bough.ipc.store import StoreServer
from bough.runner.capture import capture

SIZES = (1, 4096, 1 << 20)


@pytest.fixture(scope="module")
def talk() -> Iterator[GroupCollectives]:
    server = StoreServer([])
    device = torch.device("cuda", torch.cuda.current_device())
    made = ProcessGroups(server.local(), 0, 1, device, timeout_s=60.0).connect([0])
    assert dist.get_backend() == "nccl"
    made.all_reduce(torch.ones(1, device="cuda"))  # the communicator is made at the first call
    torch.cuda.synchronize()
    yield made
    dist.destroy_process_group()
    server.close()


Call = Callable[[GroupCollectives, torch.Tensor], torch.Tensor]
CALLS: dict[str, Call] = {
    "all_reduce": lambda talk, x: talk.all_reduce(x.clone()),
    "all_gather": lambda talk, x: talk.all_gather(x)[0],
    "reduce_scatter": lambda talk, x: talk.reduce_scatter(x[None]),
    "all_to_all": lambda talk, x: talk.all_to_all(x, [len(x)], [len(x)]),
    "broadcast": lambda talk, x: talk.broadcast(x.clone(), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_one_rank_hears_itself(name: str, dtype: torch.dtype, talk: GroupCollectives) -> None:
    for size in SIZES:
        x = torch.randn(size, device="cuda").to(dtype)
        assert torch.equal(CALLS[name](talk, x), x)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_in_a_captured_graph(name: str, talk: GroupCollectives) -> None:
    """Between two products, as in a block; replays read what is in the input then, and the watchdog breaks no capture."""
    x = torch.randn(64, 64, device="cuda")
    weight = torch.randn(64, 64, device="cuda")
    for _ in range(5):  # the watchdog looks every 100 ms: one capture could slip through
        graph, out = capture(lambda: CALLS[name](talk, x @ weight) @ weight)
        for _ in range(20):
            x.normal_()
            graph.replay()
            torch.testing.assert_close(out, x @ weight @ weight)


def test_a_graph_of_many_layers(talk: GroupCollectives) -> None:
    """160 sums in one graph, as a decode step of 80 layers has; replayed without a word from the host."""
    x = torch.full((8, 1024), 2.0, device="cuda", dtype=torch.bfloat16)

    def layers() -> torch.Tensor:
        stream = x.clone()
        for _ in range(160):
            stream = talk.all_reduce(stream * 1.0)
        return stream

    graph, out = capture(layers)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    assert torch.equal(out, x)
    print(f"{begin.elapsed_time(end) / 20 / 160 * 1000:.1f} us for a sum of 16 KB with world size 1")
