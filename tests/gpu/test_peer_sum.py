"""Sums by reading other ranks' memory. One GPU: two processes on it take turns, which shows that memory is shared and sums
are right; two ranks on two streams of one process run at once, and their time is a lower bound of that of two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from bough.distributed.collectives import ordered_sum
from bough.ipc.link import Listener
from bough.ipc.store import StoreServer
from bough.kernels.norm import reference
from bough.kernels.peer_sum.cuda import PeerMemory, PeerSum

pytestmark = pytest.mark.alone
OTHER = Path(__file__).with_name("peer_process.py")


def test_two_processes(tmp_path: Path) -> None:
    """Each sums with the other, and compares with what both know."""
    server = StoreServer([Listener(str(tmp_path / "meeting"))])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, OTHER, str(rank), str(tmp_path / "meeting")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert [each.splitlines()[-1:] for each in said] == [["same"], ["same"]], said
    finally:
        for rank in ranks:
            rank.kill()
        server.close()


class Pair:
    """Two ranks on streams of this process."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.memories = [PeerMemory(self.device) for _ in range(2)]
        addresses = [each.address for each in self.memories]
        self.ranks = [PeerSum(addresses, rank, self.device) for rank in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)]

    def close(self) -> None:
        torch.cuda.synchronize()
        for each in self.memories:
            each.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_the_order_of_ranks(pair: Pair, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 7, 64, 257):
        parts = [torch.randn(tokens, 2048, device="cuda").to(dtype) for _ in range(2)]
        expected, given = ordered_sum(parts), [each.clone() for each in parts]
        torch.cuda.synchronize()
        for rank, stream in zip(range(2), pair.streams, strict=True):
            with torch.cuda.stream(stream):
                pair.ranks[rank].all_reduce(given[rank])
        torch.cuda.synchronize()
        assert all(torch.equal(each, expected) for each in given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_sums(pair: Pair, dtype: torch.dtype) -> None:
    for tokens in (1, 5, 64, 200):
        parts = [torch.randn(tokens, 4096, device="cuda").to(dtype) for _ in range(2)]
        residual, weight = torch.randn_like(parts[0]), torch.randn(4096, device="cuda").to(dtype)
        torch.cuda.synchronize()
        made = []
        for rank, stream in zip(range(2), pair.streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(pair.ranks[rank].add_norm(parts[rank], residual, weight, 1e-5, 0.0))
        torch.cuda.synchronize()
        normed, total = reference.add_rms_norm(ordered_sum(parts), residual, weight, 1e-5)
        for mine, summed in made:
            assert torch.equal(summed, total)
            assert torch.equal(mine, made[0][0])
            torch.testing.assert_close(mine, normed)


def test_in_graphs_and_how_long_it_takes(pair: Pair) -> None:
    """A graph per rank, with as many sums as a decode step of 32 layers; replays find their place by themselves."""
    for tokens in (1, 8, 64, 256):
        for kind in ("sum", "norm"):
            measure(pair, kind, tokens)


def measure(pair: Pair, kind: str, tokens: int) -> None:
    parts = [torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    residual, weight = torch.randn_like(parts[0]), torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def work(rank: int) -> torch.Tensor:
        out = parts[rank]
        for _ in range(64):
            if kind == "sum":
                out = pair.ranks[rank].all_reduce(parts[rank].clone())
            else:
                out, _ = pair.ranks[rank].add_norm(parts[rank], residual, weight, 1e-5, 0.0)
        return out

    graphs, outs = zip(*(recorded(pair, rank, work) for rank in range(2)), strict=True)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        replay(pair, graphs)
    torch.cuda.synchronize()
    begin.record(pair.streams[0])
    for _ in range(10):
        replay(pair, graphs)
    end.record(pair.streams[0])
    torch.cuda.synchronize()
    summed = ordered_sum(parts)
    expected = summed if kind == "sum" else reference.add_rms_norm(summed, residual, weight, 1e-5)[0]
    for out in outs:
        torch.testing.assert_close(out, expected)
    print(f"{kind} of {tokens} x 4096 bf16: {begin.elapsed_time(end) / 640 * 1000:.1f} us, two ranks of one GPU")


def replay(pair: Pair, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
    for graph, stream in zip(graphs, pair.streams, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()


def recorded(pair: Pair, rank: int, work: Callable[[int], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one rank. Nothing runs while it is captured, so that the other rank need not be there."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=pair.streams[rank], capture_error_mode="thread_local"):
        out = work(rank)
    return graph, out
