"""Ranks that share the KV of sequences, through `bough serve`: the answers of transformers to short and long prompts, and
half the KV on each rank."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from cluster import PROMPTS, Cluster, free_port, greedy
from prompts import make_prompt, noise, reference_answer
from seeing import load
from thread_engine import ThreadEngine
from tiny import make_tiny
from tiny_vision import END, IMAGE, START

from bough.config.hf import open_checkpoint
from bough.config.layout import Layout
from bough.config.shares import rank_kv_values, rank_parameters
from bough.models.registry import facts_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
LONG = pytest.mark.long
LONG_PROMPTS = [[(7 * i + 3) % 120 + 3 for i in range(180)], [(5 * i + 1) % 120 + 3 for i in range(200)]]

CASES = {
    "two": ("llama", Layout(tp=2, cp=2), ()),
    "windows": ("gemma3", Layout(tp=4, cp=2), ("--chunked-prefill-size", "150")),
    "latents": ("deepseek_v3", Layout(tp=4, cp=2, dp=2, ep=4, whole_shared=True), ("--moe-a2a-backend", "alltoall")),
}


@pytest.mark.parametrize("case", ["two", *(pytest.param(case, marks=LONG) for case in CASES if case != "two")])
def test_a_shared_context_answers_as_one(case: str, tmp_path: Path) -> None:
    from families import LATENTS

    model, layout, more = CASES[case]
    prefix, extra = LATENTS.get(model, (model, {}))
    reference = make_tiny(prefix, tmp_path, **extra)
    prompts = [*PROMPTS, *LONG_PROMPTS]
    expected = greedy(reference, prompts, 8)
    sizes = ("--tp-size", str(layout.tp), "--attn-cp-size", str(layout.cp), "--attn-dp-size", str(layout.dp))
    with Cluster(tmp_path, *sizes, "--ep-size", str(layout.ep), *more) as served:
        assert served.ask(prompts, 8) == expected
        assert served.ask(prompts, 8) == expected, "with cached prefixes"
        scored = httpx.post(
            f"{served.url}/generate",
            json={"input_ids": [*LONG_PROMPTS[0], 9], "sampling_params": {"temperature": 0, "max_new_tokens": 2},
                  "return_logprob": True, "logprob_start_len": 0},
            timeout=60,
        ).json()["meta_info"]  # fmt: skip
        assert len(scored["input_token_logprobs"]) == len(LONG_PROMPTS[0]) + 1
        held = served.info()["engine"]["ranks"]
    check_bytes(tmp_path, layout, held)


@LONG
def test_a_context_on_two_machines(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path)
    meeting = ("--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--dist-secret", "a long secret")
    sizes = ("--tp-size", "2", "--attn-cp-size", "2")
    with Cluster(tmp_path, *sizes, *meeting, per_node=[("--node-rank", "0"), ("--node-rank", "1")]) as served:
        assert served.ask(LONG_PROMPTS, 8) == greedy(reference, LONG_PROMPTS, 8)
        held = served.info()["engine"]["ranks"]
    check_bytes(tmp_path, Layout(tp=2, cp=2), held)


@pytest.mark.parametrize(
    ("name", "replicas"), [("qwen2_5_vl", 1), pytest.param("qwen3_vl", 1, marks=LONG), ("qwen2_vl", 2)]
)
def test_images_in_a_prompt_that_is_split(name: str, replicas: int) -> None:
    """Each rank places what the tower gives for its own tokens, and turns their positions."""
    seen = load(name)
    marks, tail = [START, IMAGE, END], [(7 * i + 3) % 100 + 9 for i in range(140)]
    prompts = [
        make_prompt(seen.processor, [5, *marks, 9, *marks, *tail], [noise(24, 40), noise(56, 64)]),
        make_prompt(seen.processor, [*tail, *marks, 7], [noise(48, 64, seed=1)]),
        make_prompt(seen.processor, [5, *marks, 9], [noise(24, 40)]),
    ]
    with ThreadEngine(seen.checkpoint.path, tp_size=2 * replicas, attn_cp_size=2, attn_dp_size=replicas) as engine:
        for _ in range(2):
            for prompt in prompts:
                engine.features |= prompt.features
            asked = [engine.submit(each.ids, 8, media=each.items, positions=each.positions) for each in prompts]
            expected = [reference_answer(seen.reference, each, seen.tower, 8) for each in prompts]
            assert [engine.answer(each) for each in asked] == expected
        assert any(context is not None and context.num_splits for context in engine.contexts())


def check_bytes(model: Path, layout: Layout, held: list[dict[str, int]]) -> None:
    """Each rank holds its part of every page, and of feed-forward blocks."""
    facts = facts_of(open_checkpoint(str(model)).config)
    tables = 4 * 2 * facts.max_context * max(mixer.head_dim for mixer in facts.mixers) * 2
    page = 4 * layout.cp
    alone = 4 * rank_kv_values(facts, Layout(), 0) * (4096 + 4)
    for rank, each in enumerate(held):
        assert each["kv_bytes"] == 4 * rank_kv_values(facts, layout, rank) * (4096 + page)
        assert each["kv_bytes"] < 0.55 * alone
        planned = 4 * rank_parameters(facts, layout, rank)
        assert planned * 0.9 <= each["weight_bytes"] <= planned * 1.1 + tables
        assert planned < 0.9 * 4 * facts.num_parameters()
