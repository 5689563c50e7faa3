"""Collectives of torch.distributed: NCCL between GPUs, gloo between processes on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bough.distributed.collectives import ordered_sum
from bough.distributed.store import TorchStore
from bough.ipc.store import AnyStore

# torch 2.13 renames them, and warns of the old names.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

_ONE_SHOT_BYTES = 1 << 16
"""Up to this size every rank gathers everything and sums it by itself: one round of messages instead of two."""


class GroupCollectives:
    """One rank's end of a process group. gloo only carries tensors here: sums are ours, so that their order is known."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], store: TorchStore) -> None:
        """`ranks`: the group's members by their number in the whole job. `store`: what they meet through."""
        self._group = group
        self._store = store
        """Kept: NCCL's watchdog calls it as long as there are groups, and torch itself keeps its half in C++ alone."""
        self._ranks = list(ranks)
        self._sums_itself = group.name() != "gloo"

    @property
    def size(self) -> int:
        return len(self._ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._sums_itself:
            dist.all_reduce(x, group=self._group)
            return x
        if x.nbytes <= _ONE_SHOT_BYTES or x.numel() < self.size:
            return ordered_sum(self.all_gather(x))
        flat = x.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % self.size)).view(self.size, -1)
        return self.all_gather(self.reduce_scatter(padded)).view(-1)[: len(flat)].view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        _all_gather(out.view(-1), x.contiguous().view(-1), group=self._group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if self._sums_itself:
            out = x.new_empty(x.shape[1:])
            _reduce_scatter(out.view(-1), x.contiguous().view(-1), group=self._group)
            return out
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x.contiguous(), group=self._group)
        return ordered_sum(parts)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self._group)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        dist.broadcast(x, self._ranks[source], group=self._group)
        return x

    def send(self, x: Tensor, to: int) -> None:
        dist.send(x.contiguous(), self._ranks[to], group=self._group)

    def receive(self, x: Tensor, source: int) -> Tensor:
        dist.recv(x, self._ranks[source], group=self._group)
        return x

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class ProcessGroups:
    """torch.distributed in this process: started at the first group, which all ranks ask for."""

    def __init__(self, store: AnyStore, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        self._store = TorchStore(store, timeout_s)
        self._rank, self._num_ranks = rank, num_ranks
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)

    @property
    def backend(self) -> str:
        return "nccl" if self._device.type == "cuda" else "gloo"

    def connect(self, ranks: Sequence[int], backend: str | None = None) -> GroupCollectives:
        """The collectives of these ranks, this one among them. Only they call, once all have called for all ranks.
        `backend`: another than that of the device."""
        if not dist.is_initialized():
            if self.backend == "nccl":
                torch.cuda.set_device(self._device)
            dist.init_process_group(
                self.backend, store=self._store, rank=self._rank, world_size=self._num_ranks, timeout=self._timeout
            )
        if len(ranks) == self._num_ranks and backend in (None, self.backend):
            assert dist.group.WORLD is not None
            return GroupCollectives(dist.group.WORLD, ranks, self._store)
        group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        return GroupCollectives(group, ranks, self._store)
