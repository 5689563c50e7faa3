"""Ranks that hold different experts, through `bough serve`: tokens are dispatched, experts move under traffic, and answers
stay those of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from cluster import PROMPTS, Cluster, greedy
from held_bytes import check_served
from tiny import make_tiny

from bough.config.layout import Layout

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
LONG = pytest.mark.long
ADMIN = {"Authorization": "Bearer administrator"}


def metric(served: Cluster, name: str) -> float:
    found = re.search(rf"^bough:{name}\S* (\S+)$", httpx.get(f"{served.url}/metrics", timeout=30).text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_experts_move_under_traffic_of_two_replicas_of_attention(tmp_path: Path) -> None:
    """With copies, tokens sent to the ranks of their experts, and experts that move every 6 steps."""
    reference = make_tiny("qwen3_moe", tmp_path)
    flags = ("--tp-size", "2", "--ep-size", "2", "--moe-a2a-backend", "alltoall", "--ep-num-redundant-experts", "2")
    moving = ("--enable-eplb", "--eplb-rebalance-num-iterations", "6", "--admin-api-key", "administrator")
    replicas = ("--attn-dp-size", "2", "--load-balance-method", "round_robin")
    expected = greedy(reference, PROMPTS)
    with Cluster(tmp_path, *flags, *moving, *replicas) as served:
        for _ in range(3):
            assert served.ask(PROMPTS) == expected
        for replica in (0, 1):  # the other one runs empty steps meanwhile
            assert served.ask(PROMPTS[3:4], replica=replica) == expected[3:4]
        loads = httpx.get(f"{served.url}/v1/loads", timeout=30).json()["loads"]
        assert [each["dp_rank"] for each in loads] == [0, 1]
        assert all(each["num_cached_tokens"] > 0 for each in loads), "each has a cache of its own"
        record = httpx.post(f"{served.url}/dump_expert_distribution_record", headers=ADMIN, timeout=30).json()
        held = served.info()["engine"]["ranks"]
        assert metric(served, "expert_rebalances_total") >= 1
        assert metric(served, "expert_moves_total") >= 1
        assert 0.5 <= metric(served, "expert_balancedness") <= 1
    assert record["rebalances"] >= 1
    counts = record["logical_count"]
    assert len(counts) == 2
    assert len({sum(layer) for layer in counts}) == 1, "every layer has seen as many tokens"
    assert sum(counts[0]) >= 3 * (sum(map(len, PROMPTS)) - len(PROMPTS) * 4)
    check_served(tmp_path, Layout(tp=2, dp=2, ep=2, redundant=2, whole_shared=True), held)


@LONG
@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_a_count_becomes_a_location(kind: str, tmp_path: Path) -> None:
    """Tokens counted by one server say where experts are in the next; with stages, and experts that ranks split."""
    reference = make_tiny("qwen2_moe", tmp_path)
    expected = greedy(reference, PROMPTS)
    flags = ("--tp-size", "2", "--ep-size", "2", "--admin-api-key", "administrator")
    with Cluster(tmp_path, *flags, "--expert-distribution-recorder-mode", "stat") as served:
        for action in ("start", "stop"):
            httpx.post(f"{served.url}/{action}_expert_distribution_record", headers=ADMIN, timeout=30)
            if action == "start":
                assert served.ask(PROMPTS) == expected
        record = httpx.post(f"{served.url}/dump_expert_distribution_record", headers=ADMIN, timeout=30).json()
    location = tmp_path / "location.json"
    location.write_text(json.dumps({"logical_count": record["logical_count"]}))
    where = ("--init-expert-location", str(location), "--moe-a2a-backend", kind, "--ep-num-redundant-experts", "2")
    with Cluster(tmp_path, "--pp-size", "2", "--tp-size", "4", "--ep-size", "2", *where) as served:
        assert served.ask(PROMPTS) == expected
