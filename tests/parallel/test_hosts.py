"""Ranks on several machines, which are processes with addresses of their own here: the same answers, and what is said when
one of them ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from cluster import PROMPTS, Cluster, Node, free_port, greedy
from held_bytes import check_served
from tiny import make_tiny

from bough.config.layout import Layout
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
LONG = pytest.mark.long


def two_machines(model: Path, *flags: str) -> Cluster:
    return Cluster(
        model, "--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}",
        "--dist-secret", "a long secret", *flags, per_node=[("--node-rank", "0"), ("--node-rank", "1")],
    )  # fmt: skip


def rank_of(node: Node, rank: int) -> psutil.Process:
    """The process of a rank."""
    for child in psutil.Process(node.process.pid).children():
        line = child.cmdline()
        if "bough.engine" in line and line[-1] == f"rank{rank}":
            return child
    raise AssertionError(f"there is no rank {rank}")


def both_end(cluster: Cluster, within_s: float) -> float:
    """Seconds until all servers have ended."""
    began = time.monotonic()
    assert until(lambda: all(node.process.poll() is not None for node in cluster.nodes), within_s), cluster.nodes[0].log
    return time.monotonic() - began


def test_two_machines_answer_as_one_and_end_together(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path)
    with two_machines(tmp_path) as served:
        assert served.ask(PROMPTS) == greedy(reference, PROMPTS)
        held = served.info()["engine"]["ranks"]
        check_served(tmp_path, Layout(tp=2), held)
        assert "2 ranks of world talk by gloo" in served.nodes[0].log
        other = served.nodes[1]
        refused = httpx.post(f"{other.url}/generate", json={"input_ids": [1]}, timeout=20)
        assert refused.status_code == 404
        assert "machine 1 takes no requests" in refused.text
        rank_of(other, 1).send_signal(signal.SIGSTOP)
        took_s = both_end(served, 30)
        assert took_s < 15, "a stopped rank is seen within seconds"
        for node, told in (
            (other, "rank1 process was stopped"),
            (served.nodes[0], "machine 1: the rank1 process was stopped"),
        ):
            assert told in node.log
            assert node.process.returncode != 0


@LONG
def test_a_killed_machine_ends_the_group(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with two_machines(tmp_path) as served:
        served.nodes[1].process.kill()
        both_end(served, 30)
        assert "machine 1 was not heard of" in served.nodes[0].log or "a rank on another machine" in served.nodes[0].log


@LONG
def test_machine_zero_takes_the_others_with_it(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with two_machines(tmp_path) as served:
        os.kill(served.nodes[0].process.pid, signal.SIGTERM)
        both_end(served, 30)
        assert [node.process.returncode for node in served.nodes] == [0, 0], served.nodes[1].log


@LONG
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named(tmp_path: Path, number: signal.Signals) -> None:
    make_tiny("llama", tmp_path)
    with Cluster(tmp_path, "--tp-size", "2") as served:
        rank_of(served.nodes[0], 1).send_signal(number)
        both_end(served, 30)
        how = "was killed (SIGKILL)" if number == signal.SIGKILL else "was stopped (SIGSTOP)"
        assert f"the rank1 process {how}" in served.nodes[0].log
