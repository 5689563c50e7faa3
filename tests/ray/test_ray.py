"""Machines that Ray finds: two of its nodes on this one serve a model, and end together.

make test-ray      # in an environment of its own, since Ray is no part of `make setup`
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster import PROMPTS, SETTINGS, Cluster, Node, greedy
from tiny import make_tiny

from tests.waiting import until

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster with two nodes."""
    from ray.cluster_utils import Cluster as RayCluster

    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    made = RayCluster(initialize_head=True, head_node_args=small)
    made.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield made.address
    made.shutdown()


def servers_of(node: Node) -> list[psutil.Process]:
    """Servers that run for it elsewhere: they have its model in their command line."""
    mine = node.process.pid
    found = []
    for each in psutil.process_iter(["pid", "cmdline"]):
        line = each.info["cmdline"] or []
        if each.pid != mine and "--use-ray" in line and "serve" in line:
            found.append(each)
    return found


def test_two_nodes_serve_as_one(address: str, tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path)
    os.environ["RAY_ADDRESS"] = address
    with Cluster(tmp_path, "--tp-size", "2", "--nnodes", "2", "--use-ray") as served:
        assert served.ask(PROMPTS) == greedy(reference, PROMPTS)
        held = served.info()["engine"]["ranks"]
        assert len(held) == 2
        assert held[0]["weight_bytes"] < 0.8 * sum(each.numel() * 4 for each in reference.parameters())
        assert "2 ranks of world talk by gloo" in served.nodes[0].log
        (other,) = servers_of(served.nodes[0])
    assert until(lambda: not other.is_running(), 20), "it ends with the first"


def test_a_lost_node_ends_the_group(address: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    os.environ["RAY_ADDRESS"] = address
    with Cluster(tmp_path, "--tp-size", "2", "--nnodes", "2", "--use-ray") as served:
        (other,) = servers_of(served.nodes[0])
        other.kill()
        assert until(lambda: served.nodes[0].process.poll() is not None, 20), served.nodes[0].log
        assert served.nodes[0].process.returncode != 0


def test_too_few_nodes(address: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    command = [
        sys.executable,
        "-m",
        "bough",
        "serve",
        str(tmp_path),
        *SETTINGS,
        "--tp-size",
        "3",
        "--nnodes",
        "3",
        "--use-ray",
    ]
    environment = {**os.environ, "RAY_ADDRESS": address}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ran.returncode == 1
    assert "the Ray cluster has 2 machines, 3 are needed" in ran.stderr
