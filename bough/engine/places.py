"""Where a rank of this machine stands among all that run on it. Needs no torch."""

from __future__ import annotations

from bough.config.hosts import local_ranks, ranks_per_node
from bough.ipc import Launch
from bough.platform.topology import device_order


def device_index(launch: Launch, rank: int) -> int:
    """The number of the GPU that a rank uses: replicas one after the other, and their ranks in order, along
    `device_order`."""
    parallel = launch.config.parallel
    place = launch.replica * ranks_per_node(parallel) + rank - local_ranks(parallel).start
    order = device_order().devices if orders_devices(launch) else ()
    return order[place] if place < len(order) else place


def orders_devices(launch: Launch) -> bool:
    """Whether there are several ranks on GPUs here."""
    return launch.config.device.device != "cpu" and sharing(launch) > 1


def sharing(launch: Launch) -> int:
    """Ranks on this machine, those of other replicas among them."""
    return ranks_per_node(launch.config.parallel) * launch.config.parallel.dp_size
