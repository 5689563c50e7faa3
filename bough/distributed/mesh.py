"""The mesh: who this rank is among those that split each layer. It is an argument, never ambient."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from bough.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """`size` ranks that each hold a share of every layer."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, total: int, what: str) -> int:
        """How many of `total` each rank holds. Raises ConfigError if they can't be split evenly."""
        if total % self.size:
            raise ConfigError(
                what=f"{total} {what} can't be split over {self.size} ranks",
                why=f"{total} is no multiple of {self.size}",
                fix="choose another --tp-size",
            )
        return total // self.size

    def slice(self, total: int, what: str) -> slice:
        """This rank's part of `range(total)`."""
        share = self.share(total, what)
        return slice(self.rank * share, (self.rank + 1) * share)


SINGLE: Final = Mesh()
"""The mesh of one rank."""


def join_mesh(rank: int, size: int, *, init_method: str, device: torch.device, timeout_s: float = 600.0) -> Mesh:
    """Meets the other ranks at `init_method` (`tcp://host:port`, `file://...` or `env://`) and waits for all of them."""
    if not 0 <= rank < size:
        raise ConfigError(what=f"rank {rank} is not among {size} ranks", fix="check --tp-size")
    if size == 1:
        return SINGLE
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Mesh(rank, size, dist.group.WORLD)


def leave_mesh(mesh: Mesh) -> None:
    """Ends the communication; the last call a rank makes."""
    if mesh.group is not None:
        dist.destroy_process_group(mesh.group)
