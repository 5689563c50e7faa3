"""Tensor parallelism through `bough serve`: the answers of transformers, and half the bytes on each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import PROMPTS, Cluster, greedy
from families import STATES
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.config.layout import Layout
from bough.config.shares import rank_kv_values, rank_parameters, rank_state_values
from bough.models.registry import facts_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
LONG = pytest.mark.long

CASES = {
    "llama": ({}, 2),
    "uneven": ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 83}, 2),
    "qwen3_moe": ({}, 2),
    "four": ({"num_key_value_heads": 2}, 4),
    "qwen3_next": (STATES["qwen3_next"][1], 2),
}


@LONG
def test_ranks_that_hold_different_experts(tmp_path: Path) -> None:
    reference = make_tiny("qwen3_moe", tmp_path)
    facts, layout = facts_of(open_checkpoint(str(tmp_path)).config), Layout(tp=2, ep=2)
    with Cluster(tmp_path, "--tp-size", "2", "--ep-size", "2") as served:
        assert served.ask(PROMPTS) == greedy(reference, PROMPTS)
        held = served.info()["engine"]["ranks"]
    tables = 4 * 2 * facts.max_context * facts.mixers[0].head_dim
    for rank, each in enumerate(held):
        planned = 4 * rank_parameters(facts, layout, rank)
        assert planned * 0.9 <= each["weight_bytes"] <= planned * 1.1 + tables
        assert each["weight_bytes"] - tables < 0.7 * 4 * facts.num_parameters()


@pytest.mark.parametrize(
    "case", ["llama", *(pytest.param(case, marks=LONG) for case in ("uneven", "qwen3_moe", "four", "qwen3_next"))]
)
def test_ranks_that_split_each_layer(case: str, tmp_path: Path) -> None:
    changes, ranks = CASES[case]
    reference = make_tiny({"qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next"}.get(case, "llama"), tmp_path, **changes)
    with Cluster(tmp_path, "--tp-size", str(ranks)) as served:
        assert served.ask(PROMPTS) == greedy(reference, PROMPTS)
        held = served.info()["engine"]["ranks"]
    facts, layout = facts_of(open_checkpoint(str(tmp_path)).config), Layout(tp=ranks)
    assert [each["rank"] for each in held] == list(range(ranks))
    tables = 4 * 2 * facts.max_context * facts.kv_mixers[0].head_dim  # rotary tables are on every rank
    for rank, each in enumerate(held):
        planned = 4 * rank_parameters(facts, layout, rank)
        assert planned * 0.9 <= each["weight_bytes"] <= planned * 1.1 + tables
        assert each["kv_bytes"] == 4 * rank_kv_values(facts, layout, rank) * (4096 + 4)
        # Of 16 rows, of rows that begin, of padding, and snapshots.
        assert each["state_bytes"] == 4 * rank_state_values(facts, layout, rank) * (2 + 16 + 2 * 16)
        assert 10 * rank_state_values(facts, layout, rank) <= 7 * rank_state_values(facts, Layout(), 0)
        assert each["kv_bytes"] < 0.7 * 4 * rank_kv_values(facts, Layout(), 0) * (4096 + 4)


@LONG
def test_drafts_where_ranks_split_states(tmp_path: Path) -> None:
    """What was right of them is taken in on every rank, and what was wrong on none."""
    reference = make_tiny("Qwen3Next", tmp_path, **STATES["qwen3_next"][1])
    prompts = [prompt * 3 for prompt in PROMPTS]
    flags = ("--speculative-algorithm", "NGRAM", "--no-speculative-adaptive", "--speculative-num-draft-tokens", "4")
    with Cluster(tmp_path, "--tp-size", "2", *flags) as served:
        assert served.ask(prompts, 48) == greedy(reference, prompts, 48)
        assert served.ask(prompts, 48) == greedy(reference, prompts, 48), "from what was said before"
