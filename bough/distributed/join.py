"""Ranks meet and become a mesh: for each axis the fastest collectives that its ranks can use together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bough.config.layout import AxisName, Layout
from bough.core.errors import ConfigError
from bough.distributed.collectives import Collectives
from bough.distributed.mesh import SINGLE, Axis, Mesh, make_mesh
from bough.distributed.peers import open_peers
from bough.distributed.process_group import ProcessGroups
from bough.distributed.shared_memory import Patience, SharedMemoryCollectives, segment_bytes
from bough.ipc.segment import Segment
from bough.ipc.store import AnyStore

Kind = Literal["nccl", "shared memory", "gloo"]


@dataclass(frozen=True, slots=True)
class CollectivesChoice:
    """A kind of collectives, and why it was chosen."""

    kind: Kind
    because: str


def choose(device: str, num_hosts: int, shared_memory: bool) -> CollectivesChoice:
    """How ranks on `num_hosts` machines talk; `shared_memory`: whether those on one can share memory."""
    if device == "cuda":
        return CollectivesChoice("nccl", "GPUs")
    if num_hosts > 1:
        return CollectivesChoice("gloo", f"CPUs of {num_hosts} machines")
    if not shared_memory:
        return CollectivesChoice(
            "gloo", "nothing is compiled here, and this processor's stores may be seen out of order"
        )
    return CollectivesChoice("shared memory", "CPU ranks of one machine")


def join_host(
    layout: Layout,
    rank: int,
    store: AnyStore,
    axis: Axis,
    *,
    patience: Patience | None = None,
    timeout_s: float = 600.0,
) -> Collectives:
    """Collectives for tensors on the host between the first ranks of replicas of attention, whatever the others use. Waits
    for all of them. `axis`: that of the replicas."""
    ranks = next(group for group in layout.groups("dp") if rank in group)
    if not SharedMemoryCollectives.possible():
        cpu = torch.device("cpu")
        return ProcessGroups(store, rank, layout.size, cpu, timeout_s).connect(ranks, backend="gloo")
    return _share_memory(store, f"segment/host/{ranks[0]}", axis.rank, len(ranks), patience, timeout_s)


def _share_memory(
    store: AnyStore, key: str, place: int, size: int, patience: Patience | None, timeout_s: float
) -> SharedMemoryCollectives:
    if place == 0:
        segment = Segment.create(segment_bytes(size))
        store.set(key, segment.path.encode())
    else:
        segment = Segment.open(store.get(key, timeout_s).decode())
    talk = SharedMemoryCollectives(segment, place, size, patience=patience)
    talk.barrier()  # after it, the segment's maker may let go of its descriptor
    return talk


def join_mesh(
    layout: Layout,
    rank: int,
    store: AnyStore,
    *,
    device: torch.device,
    hosts: Sequence[int] | None = None,
    patience: Patience | None = None,
    timeout_s: float = 600.0,
    say: Callable[[str], None] | None = None,
    peer_sums: bool = False,
) -> Mesh:
    """Meets the other ranks at the store, and waits for all of them.

    `hosts`: the machine of each rank (None: all are on this one). `say` hears what was chosen for each axis. `peer_sums`:
    GPUs of one machine sum small messages by reading one another's memory.
    """
    if not 0 <= rank < layout.size:
        raise ConfigError(what=f"rank {rank} is not among {layout.size} ranks", fix="check --tp-size")
    if layout.size == 1:
        return SINGLE
    places = list(hosts) if hosts is not None else [0] * layout.size
    groups = ProcessGroups(store, rank, layout.size, device, timeout_s)

    def connect(axis: AxisName, ranks: list[int], place: int) -> Collectives:
        num_hosts = len({places[each] for each in ranks})
        choice = choose(device.type, num_hosts, SharedMemoryCollectives.possible())
        if say is not None:
            say(f"{len(ranks)} ranks of {axis} talk by {choice.kind}: {choice.because}")
        if choice.kind == "nccl" and peer_sums and num_hosts == 1:
            base = groups.connect(ranks)
            return open_peers(base, store, f"peers/{axis}/{ranks[0]}", place, len(ranks), device, timeout_s, say)
        if choice.kind != "shared memory":
            return groups.connect(ranks)
        return _share_memory(store, f"segment/{axis}/{ranks[0]}", place, len(ranks), patience, timeout_s)

    return make_mesh(layout, rank, connect)
