"""Which machine this is, and which ranks it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bough.cli.config_flags import parse
from bough.config.concerns import ParallelConfig
from bough.config.hosts import LEADER_PORT, local_ranks, machine_variables, nodes_of_ranks, ranks_per_node
from bough.config.server_args import load_config
from bough.core.errors import ConfigError

SECRET = {"BOUGH_DIST_SECRET": "a long secret"}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.svc"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def test_ranks_are_spread_in_order() -> None:
    parallel = ParallelConfig(tp_size=4, nnodes=2, node_rank=1)
    assert list(local_ranks(parallel)) == [2, 3]
    assert nodes_of_ranks(parallel) == [0, 0, 1, 1]
    assert list(local_ranks(ParallelConfig())) == [0]


@pytest.mark.parametrize(("environ", "address"), [(LWS, "leader.svc:20000"), (TORCHRUN, "10.0.0.1:29501")])
def test_variables_of_other_launchers(environ: dict[str, str], address: str) -> None:
    parallel = load_config({"tp_size": 2}, environ=environ | SECRET).config.parallel
    assert (parallel.nnodes, parallel.node_rank, parallel.dist_init_addr) == (2, 1, address)
    alone = load_config({"nnodes": 1}, environ=environ).config.parallel
    assert (alone.nnodes, alone.node_rank, alone.dist_init_addr) == (1, 0, "")


def test_the_manifest_starts_as_many_ranks_as_a_machine_has_gpus() -> None:
    manifest = Path(__file__).parents[3] / "deploy" / "leaderworkerset.yaml"
    group, service = yaml.safe_load_all(manifest.read_text())
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    (container,) = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    command, *flags = container["args"]
    assert command == "serve"
    given = {each["name"]: each.get("value", "a long secret") for each in container["env"]}
    for worker in range(size):
        environ = {**given, **LWS, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(worker)}
        config = parse(flags, environ=environ).loaded.config
        assert (config.parallel.nnodes, config.parallel.node_rank) == (size, worker)
        assert ranks_per_node(config.parallel) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": config.server.port, "meeting": LEADER_PORT}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert service["spec"]["ports"][0]["targetPort"] == "http"


def test_one_machine_sets_nothing() -> None:
    assert machine_variables({"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}) == {}
    assert machine_variables({**TORCHRUN, "GROUP_WORLD_SIZE": "1"}) == {}


def test_one_server_per_machine() -> None:
    with pytest.raises(ConfigError, match="torchrun starts 8 servers") as caught:
        machine_variables({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"})
    assert "--nproc-per-node 1" in caught.value.fix


MACHINES = {"nnodes": 2, "tp_size": 2, "dist_init_addr": "10.0.0.1:20000", "dist_secret": "a long secret"}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tp_size": 3}, "can't be spread evenly"),
        ({"dist_init_addr": ""}, "don't know where to meet"),
        ({"dist_secret": "short"}, "need a secret"),
        ({"node_rank": 2}, "node_rank"),
        ({"nnodes": 1}, "there is one machine"),
    ],
)
def test_machines_that_can_not_work_are_refused(change: dict[str, object], what: str) -> None:
    load_config(MACHINES, environ={})
    with pytest.raises(ConfigError, match=what) as caught:
        load_config({**MACHINES, **change}, environ={})
    assert caught.value.fix
