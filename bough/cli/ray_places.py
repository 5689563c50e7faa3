"""`--use-ray`: the machines of an engine are found by Ray, which starts `bough serve` on each of them and nothing else.

The machines communicate over their own connections; Ray is used only when the group starts and ends.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bough.cli.config_flags import without_flags
from bough.config.concerns import Config
from bough.config.hosts import ranks_per_node
from bough.core.errors import ConfigError, Unavailable
from bough.ipc.link import show_address
from bough.platform.facts import detect

_PLACED_S: Final = 60.0
"""Seconds that Ray may take to allocate a machine."""
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


class RayPlaces:
    """The machines that Ray has allocated. `config` is that of this machine, number 0. Close it after the server has
    ended."""

    def __init__(self, config: Config, argv: Sequence[str]) -> None:
        """`argv`: the command line of this server, which the other machines get, too. Raises `ConfigError` without Ray, and
        `Unavailable` if the cluster has not enough machines."""
        self._ray = _import_ray()
        try:
            self._ray.init(address="auto", ignore_reinit_error=True)
        except ConnectionError as error:
            raise Unavailable(
                what="there is no Ray cluster",
                why=str(error).splitlines()[0],
                fix="`ray start --head`, or set RAY_ADDRESS",
            ) from error
        self._places: list[Any] = []
        try:
            self.config = self._place(config, argv)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the servers of the other machines, and releases the machines."""
        for place in self._places:
            self._ray.kill(place)
        self._ray.shutdown()

    def _place(self, config: Config, argv: Sequence[str]) -> Config:
        parallel = config.parallel
        gpus = ranks_per_node(parallel) if detect(config.device.device).kind == "cuda" else 0
        here = self._ray.get_runtime_context().get_node_id()
        alive = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        if len(alive) < parallel.nnodes:
            raise Unavailable(
                what=f"the Ray cluster has {len(alive)} machines, {parallel.nnodes} are needed",
                fix="add machines with `ray start --address ...`, or choose a smaller --nnodes",
            )
        others = [node for node in alive if node != here]
        self._places = [self._reserve(here, gpus), *(self._reserve(node, gpus) for node in others)]
        given = self._given(parallel.nnodes)
        (address, visible), *elsewhere = [self._ray.get(place.where.remote()) for place in given]
        if visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        for place in self._places:
            if place not in given:
                self._ray.kill(place)
        self._places = given
        parallel = replace(
            parallel,
            dist_init_addr=parallel.dist_init_addr or show_address(address, _free_port(address)),
            dist_secret=parallel.dist_secret or secrets.token_hex(16),
        )
        for number, (place, (at, _)) in enumerate(zip(given[1:], elsewhere, strict=True), 1):
            environment = {
                "BOUGH_NODE_RANK": str(number),
                "BOUGH_DIST_INIT_ADDR": parallel.dist_init_addr,
                "BOUGH_DIST_SECRET": parallel.dist_secret,
            }
            command = list(argv)
            if at == address:  # two of Ray's machines are one: each server needs a port of its own
                command = [*without_flags(command, "--port"), "--port", str(_free_port(at))]
            self._ray.get(place.start.remote(command, environment))
        return replace(config, parallel=parallel)

    def _reserve(self, node: str, gpus: int) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = self._ray.remote(RayPlace).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy)
        return actor.remote()

    def _given(self, count: int) -> list[Any]:
        """The first `count` machines that Ray allocates, including this one; others may be busy."""
        asked = {place.where.remote(): place for place in self._places}
        ready, _ = self._ray.wait(list(asked), num_returns=count, timeout=_PLACED_S)
        found = [asked[each] for each in ready]
        if self._places[0] not in found:
            ready, _ = self._ray.wait([each for each, place in asked.items() if place is self._places[0]], timeout=0)
            found = [*found[: count - 1], self._places[0]] if ready else found[: count - 1]
        if len(found) < count or self._places[0] not in found:
            raise Unavailable(
                what=f"Ray gave {len(found)} of {count} machines within {_PLACED_S:g} s",
                why="the GPUs of the others are in use, or of this one",
                fix="`ray status` says by what",
            )
        return [self._places[0], *(place for place in found if place is not self._places[0])]


class RayPlace:
    """A machine, as Ray's actor: holds its GPUs, and runs one server on it."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, str]:
        """The machine's address, and the GPUs that Ray has allocated."""
        import ray

        return ray.util.get_node_ip_address(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts `bough serve`, which ends with this process at the latest."""
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "bough", "serve", *argv],
            env={**os.environ, **environment},
            process_group=0,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            what="--use-ray needs Ray", why="it is not installed", fix="pip install 'bough[ray]'", param="use_ray"
        ) from None
    return ray


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
