"""Where a rank of this machine stands among all that run on it. Needs no torch."""

from __future__ import annotations

from bough.config.hosts import local_ranks, ranks_per_node
from bough.ipc import Launch


def device_index(launch: Launch, rank: int) -> int:
    """The number of the GPU that a rank uses: replicas one after the other, and their ranks in order."""
    parallel = launch.config.parallel
    return launch.replica * ranks_per_node(parallel) + rank - local_ranks(parallel).start


def sharing(launch: Launch) -> int:
    """Ranks on this machine, those of other replicas among them."""
    return ranks_per_node(launch.config.parallel) * launch.config.parallel.dp_size
