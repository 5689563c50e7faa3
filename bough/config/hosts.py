"""The machines of one engine: which ranks run on which, and the environment variables with a machine's index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bough.config.concerns import ParallelConfig
from bough.config.layout import Layout
from bough.core.errors import ConfigError

MACHINE_SETTINGS: Final = ("nnodes", "node_rank", "dist_init_addr")
LEADER_PORT: Final = 20000
"""Port of machine 0 if only its host is known (LeaderWorkerSet)."""

LEAST_SECRET: Final = 8
"""Minimum length of a secret between machines, in characters."""


def machine_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Values of `MACHINE_SETTINGS` that LeaderWorkerSet or torchrun has left in the environment; empty: one machine.

    Raises `ConfigError` if torchrun starts more than one server on a machine.
    """
    if int(environ.get("LWS_GROUP_SIZE") or 1) > 1:
        return {
            "nnodes": environ["LWS_GROUP_SIZE"],
            "node_rank": environ.get("LWS_WORKER_INDEX", "0"),
            "dist_init_addr": f"{environ.get('LWS_LEADER_ADDRESS', '')}:{LEADER_PORT}",
        }
    if "TORCHELASTIC_RUN_ID" in environ and int(environ.get("GROUP_WORLD_SIZE") or 1) > 1:
        if int(environ.get("LOCAL_WORLD_SIZE") or 1) > 1:
            raise ConfigError(
                what=f"torchrun starts {environ['LOCAL_WORLD_SIZE']} servers on each machine",
                why="a server starts the ranks of its machine itself",
                fix="torchrun --nproc-per-node 1",
            )
        # torchrun listens on the master's port itself.
        return {
            "nnodes": environ["GROUP_WORLD_SIZE"],
            "node_rank": environ.get("GROUP_RANK", "0"),
            "dist_init_addr": f"{environ.get('MASTER_ADDR', '')}:{int(environ.get('MASTER_PORT') or 0) + 1}",
        }
    return {}


def ranks_per_node(parallel: ParallelConfig) -> int:
    """Ranks of the engine on each machine."""
    return Layout.of(parallel).size // parallel.nnodes


def local_ranks(parallel: ParallelConfig) -> range:
    """The ranks that this machine runs: consecutive ones, so that the axes that communicate most stay on one
    machine."""
    per_node = ranks_per_node(parallel)
    return range(parallel.node_rank * per_node, (parallel.node_rank + 1) * per_node)


def crew_of(parallel: ParallelConfig, rank: int) -> list[int]:
    """The ranks that run the steps of one scheduler, that of `rank`; the first of them decides."""
    layout = Layout.of(parallel)
    replica = layout.place(rank)["dp"]
    return [each for each in range(layout.size) if layout.place(each)["dp"] == replica]


def nodes_of_ranks(parallel: ParallelConfig) -> list[int]:
    """The machine of each rank."""
    per_node = ranks_per_node(parallel)
    return [rank // per_node for rank in range(Layout.of(parallel).size)]
