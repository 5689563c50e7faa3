"""Replicas behind one server: the same answers from each, requests that belong together meet, and a death that the others
survive."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cluster import NEW_TOKENS, PROMPTS, Cluster, greedy
from held_bytes import check_served
from tiny import make_tiny

from bough.config.layout import Layout
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def ask(served: Cluster, **body: Any) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return httpx.post(f"{served.url}/generate", json={"sampling_params": sampling, **body}, timeout=60)


def engine_of(served: Cluster, replica: int) -> psutil.Process:
    for child in psutil.Process(served.nodes[0].process.pid).children():
        if child.cmdline()[-1] == f"engine.{replica}":
            return child
    raise AssertionError(f"there is no replica {replica}")


def test_two_replicas_serve_as_one_and_one_survives(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path)
    expected = greedy(reference, PROMPTS)
    with Cluster(tmp_path, "--dp-size", "2", "--load-balance-method", "round_robin", "--supervise") as served:
        assert served.ask(PROMPTS) == expected
        for replica in (0, 1):
            reply = ask(served, input_ids=PROMPTS[0], data_parallel_rank=replica)
            assert reply.json()["output_ids"] == expected[0]
        assert ask(served, input_ids=PROMPTS[0], data_parallel_rank=2).status_code == 400
        loads = httpx.get(f"{served.url}/v1/loads", timeout=30).json()
        assert [load["dp_rank"] for load in loads["loads"]] == [0, 1]
        assert all(load["totals"]["requests"] >= 2 for load in loads["loads"]), "both were asked"
        held = served.info()["engine"]["ranks"]
        assert [each["replica"] for each in held] == [0, 1]
        for each in held:  # the whole model, with a KV cache of its own
            check_served(tmp_path, Layout(), [each])
        assert httpx.post(f"{served.url}/flush_cache", timeout=30).status_code == 200

        engine_of(served, 1).kill()
        assert until(lambda: "replica 1 is lost: the engine.1 process was killed" in served.nodes[0].log, 20)
        time.sleep(0.3)  # the API process looks four times a second
        assert served.ask(PROMPTS) == expected, "the other goes on"
        assert httpx.get(f"{served.url}/readyz", timeout=30).status_code == 200
        assert until(lambda: ask(served, input_ids=PROMPTS[1], data_parallel_rank=1).status_code == 200, 90, 0.2)
