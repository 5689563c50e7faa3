"""Collectives of GPUs on one machine that sum small messages by reading one another's memory, and leave the rest to NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bough.distributed.collectives import Collectives
from bough.ipc.store import AnyStore
from bough.kernels.cuda_source import CudaSourceError
from bough.kernels.peer_sum.cuda import MOST_RANKS, PeerMemory, PeerSum


@runtime_checkable
class SumsWithNorm(Protocol):
    """Collectives that can make the norm of a sum together with it."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """As that of `Collectives`."""
        ...

    def takes_norm(self, x_TD: Tensor) -> bool:
        """Whether `add_norm` takes a rank's part, and pays. All ranks get the same answer for the same shape."""
        ...

    def add_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(s + residual), s + residual), where s is the sum of `x_TD` over ranks."""
        ...


class PeerCollectives:
    """One rank's end. All ranks call for tensors of the same shapes, so that they agree on who sums."""

    def __init__(self, base: Collectives, peers: PeerSum, memory: PeerMemory) -> None:
        self._base = base
        self._peers = peers
        self._memory = memory

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        return self._peers.all_reduce(x) if self._peers.takes(x) else self._base.all_reduce(x)

    def takes_norm(self, x_TD: Tensor) -> bool:
        return self._peers.takes_norm(x_TD)

    def add_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        return self._peers.add_norm(x_TD, residual_TD.contiguous(), weight_D, eps, offset)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._base.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._base.reduce_scatter(x)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self._base.all_to_all(x, send, receive)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._base.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        self._base.send(x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        return self._base.receive(x, source)

    def barrier(self) -> None:
        self._base.barrier()

    def close(self) -> None:
        self._base.close()
        self._memory.close()


def open_peers(
    base: Collectives,
    store: AnyStore,
    key: str,
    place: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    say: Callable[[str], None] | None = None,
) -> Collectives:
    """Collectives over `base` of `size` ranks on one machine, of which this is number `place`; `base` itself where one of
    them can't open the others' memory, which `say` hears of. All ranks of the axis call it, and agree."""
    problem, opened = "", None
    memory: PeerMemory | None = None
    try:
        if size > MOST_RANKS:
            raise CudaSourceError(f"it is made for at most {MOST_RANKS} GPUs")
        memory = PeerMemory(device)
        handle = memory.handle()
    except CudaSourceError as error:
        problem, handle = str(error), b""
    handles = _exchange(store, f"{key}/memory", place, size, handle, timeout_s)
    if memory is not None and all(handles):
        try:
            addresses = [memory.address if at == place else memory.open(each) for at, each in enumerate(handles)]
            opened = PeerSum(addresses, place, device)
        except CudaSourceError as error:
            problem = str(error)
    verdicts = _exchange(store, f"{key}/opened", place, size, problem.encode() or b"-", timeout_s)
    wrong = [(at, each.decode()) for at, each in enumerate(verdicts) if each != b"-"]
    if wrong or memory is None or opened is None:
        if memory is not None:
            memory.close()
        if say is not None and wrong:
            say(f"small sums are NCCL's, too: rank {wrong[0][0]} can't read the others' memory: {wrong[0][1]}")
        return base
    return PeerCollectives(base, opened, memory)


def _exchange(store: AnyStore, key: str, place: int, size: int, value: bytes, timeout_s: float) -> list[bytes]:
    store.set(f"{key}/{place}", value)
    return [store.get(f"{key}/{each}", timeout_s) for each in range(size)]
