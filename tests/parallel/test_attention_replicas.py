"""Replicas of attention within one engine, through `bough serve`: the answers of transformers, each replica with a KV cache
of its own, and feed-forward blocks split over all ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import NEW_TOKENS, PROMPTS, Cluster, greedy
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.config.layout import Layout
from bough.config.shares import rank_kv_values, rank_parameters
from bough.models.registry import facts_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
LONG = pytest.mark.long

CASES = {
    "dense": ("llama", Layout(tp=2, dp=2), ()),
    "experts": ("qwen3_moe", Layout(tp=4, dp=2, ep=4, whole_shared=True), ("--moe-a2a-backend", "alltoall")),
    "latents": ("deepseek_v3", Layout(tp=4, dp=2, ep=2), ()),
}


@LONG  # `test_experts.py` has replicas of attention in the short form
@pytest.mark.parametrize("case", CASES)
def test_replicas_of_attention_answer_as_one(case: str, tmp_path: Path) -> None:
    from families import LATENTS

    model, layout, more = CASES[case]
    prefix, extra = LATENTS.get(model, (model, {}))
    reference = make_tiny(prefix, tmp_path, **extra)
    expected = greedy(reference, PROMPTS)
    sizes = (
        "--tp-size",
        str(layout.tp),
        "--dp-size",
        str(layout.dp),
        "--enable-dp-attention",
        "--ep-size",
        str(layout.ep),
    )
    with Cluster(tmp_path, *sizes, "--load-balance-method", "round_robin", *more) as served:
        assert served.ask(PROMPTS) == expected, "spread over both"
        for replica in range(layout.dp):  # the other one runs empty steps meanwhile
            assert ask_replica(served, replica) == expected
        assert under_load(served, expected) == []
        info = served.info()
        loads = httpx.get(f"{served.url}/v1/loads", timeout=30).json()
    assert [each["dp_rank"] for each in loads["loads"]] == list(range(layout.dp))
    assert all(each["num_cached_tokens"] > 0 for each in loads["loads"]), "each has a cache of its own"
    check_bytes(tmp_path, layout, info["engine"]["ranks"])


def ask_replica(served: Cluster, replica: int) -> list[list[int]]:
    body = {
        "input_ids": PROMPTS,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "data_parallel_rank": replica,
    }
    reply = httpx.post(f"{served.url}/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return [each["output_ids"] for each in reply.json()]


def under_load(served: Cluster, expected: list[list[int]]) -> list[Any]:
    """Clients that come and go at their own pace. Returns what was wrong."""
    wrong: list[Any] = []

    def client(number: int) -> None:
        for turn in range(4):
            at = (number + turn) % len(PROMPTS)
            answer = served.ask([PROMPTS[at]])[0]
            if answer != expected[at]:
                wrong.append((at, answer))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def check_bytes(model: Path, layout: Layout, held: list[dict[str, int]]) -> None:
    """Each rank holds what was planned for it: attention whole for its replica, the rest split over all."""
    facts = facts_of(open_checkpoint(str(model)).config)
    tables = 4 * 2 * facts.max_context * max(mixer.head_dim for mixer in facts.mixers)
    assert len(held) == layout.size
    for rank, each in enumerate(held):
        planned = 4 * rank_parameters(facts, layout, rank)
        assert planned * 0.9 <= each["weight_bytes"] <= planned * 1.1 + 2 * tables
        assert planned < 0.9 * 4 * facts.num_parameters()
        assert each["kv_bytes"] == 4 * rank_kv_values(facts, layout, rank) * (4096 + 4)
