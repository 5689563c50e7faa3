"""Stages through `bough serve`: the answers of transformers, and each rank with its part of the layers and of the KV."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from cluster import PROMPTS, Cluster, free_port, greedy
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.config.layout import Layout
from bough.config.shares import rank_kv_values, rank_parameters
from bough.models.registry import facts_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
LONG = pytest.mark.long

CASES = {
    "two": ("llama", Layout(pp=2), ()),
    "three": ("gemma3", Layout(pp=3), ("--pp-async-batch-depth", "1", "--pp-max-micro-batch-size", "2")),
    "uneven": ("llama", Layout(pp=2, stage_sizes=(1, 3)), ("--pp-layer-partition", "1,3")),
    "with tensor": ("llama", Layout(pp=2, tp=2), ()),
    "with experts": ("qwen3_moe", Layout(pp=2, tp=2, ep=2), ()),
}


@pytest.mark.parametrize("case", ["two", *(pytest.param(case, marks=LONG) for case in CASES if case != "two")])
def test_stages_answer_as_one(case: str, tmp_path: Path) -> None:
    model, layout, more = CASES[case]
    reference = make_tiny(model, tmp_path)
    prompts = [*PROMPTS, list(range(20, 70))]
    sizes = ("--pp-size", str(layout.pp), "--tp-size", str(layout.tp), "--ep-size", str(layout.ep))
    with Cluster(tmp_path, *sizes, "--chunked-prefill-size", "16", *more) as served:
        expected = greedy(reference, prompts)
        assert served.ask(prompts) == expected
        assert served.ask(prompts) == expected, "with cached prefixes"
        scored = httpx.post(
            f"{served.url}/generate",
            json={"input_ids": prompts[0], "sampling_params": {"temperature": 0, "max_new_tokens": 4},
                  "return_logprob": True, "logprob_start_len": 0},
            timeout=60,
        ).json()["meta_info"]  # fmt: skip
        assert [entry[1] for entry in scored["output_token_logprobs"]] == expected[0][:4]
        assert len(scored["input_token_logprobs"]) == len(prompts[0])
        held = served.info()["engine"]["ranks"]
    check_bytes(tmp_path, layout, held)


@LONG
def test_a_stage_on_each_machine(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path)
    meeting = ("--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--dist-secret", "a long secret")
    with Cluster(tmp_path, "--pp-size", "2", *meeting, per_node=[("--node-rank", "0"), ("--node-rank", "1")]) as served:
        assert served.ask(PROMPTS) == greedy(reference, PROMPTS)
        held = served.info()["engine"]["ranks"]
    check_bytes(tmp_path, Layout(pp=2), held)


def check_bytes(model: Path, layout: Layout, held: list[dict[str, int]]) -> None:
    """Each rank holds what was planned for it."""
    facts = facts_of(open_checkpoint(str(model)).config)
    tables = 4 * 2 * facts.max_context * max(mixer.head_dim for mixer in facts.mixers) * 2
    for rank, each in enumerate(held):
        assert each["kv_bytes"] == 4 * rank_kv_values(facts, layout, rank) * (4096 + 4)
        assert each["weight_bytes"] <= 4.4 * rank_parameters(facts, layout, rank) + tables
        assert each["weight_bytes"] - tables < 4 * 0.8 * facts.num_parameters()
