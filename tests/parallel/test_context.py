"""Ranks that share contexts: windows whose pages are given back, and images in prompts that are split. `test_served.py` and
`test_matrix.py` have the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import greedy
from families import EXPERTS
from held_bytes import FLOAT
from prompts import make_prompt, noise, reference_answer
from seeing import load
from thread_engine import ThreadEngine
from tiny import make_tiny
from tiny_vision import END, IMAGE, START

from bough.config.shares import rank_kv_values
from bough.distributed.mesh import Mesh
from bough.layers.spread import TokenSpread
from bough.runner.model_runner import ModelRunner

LONG = pytest.mark.long


class Poisoned(ThreadEngine):
    """Memory that was never written to holds what is not a number."""

    def _build(self, rank: int, mesh: Mesh) -> tuple[ModelRunner, TokenSpread | None]:
        runner, spread = super()._build(rank, mesh)
        for cache in (*runner.pool.keys, *runner.pool.values):
            cache.fill_(float("nan"))
        return runner, spread


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gemma3", {"tp_size": 2, "attn_cp_size": 2}),
        pytest.param("gpt_oss", {"tp_size": 4, "attn_cp_size": 2, "attn_dp_size": 2}, marks=LONG),
        pytest.param("llama4", {"tp_size": 2, "attn_cp_size": 2}, marks=LONG),
    ],
)
def test_windows_give_pages_back_where_ranks_share_contexts(model: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Of prompts that are computed alike, in parts and in several chunks; pages are used again by other requests."""
    prefix, extra = EXPERTS.get(model, (model, {}))
    reference = make_tiny(prefix, tmp_path, **extra)
    prompts = [[(7 * i + 3 * at) % 120 + 3 for i in range(20 + 45 * at)] for at in range(5)]
    settings = {"max_total_tokens": 512, "chunked_prefill_size": 150, "context_length": 256, **sizes}
    with Poisoned(tmp_path, **settings) as engine:
        plan = engine.decided.resolved.plan
        assert len(plan.groups) == 2, "layers with windows have lines of their own"
        assert plan.kv_note == ""
        whole = FLOAT * rank_kv_values(engine.decided.facts, engine.layout, 0)
        assert plan.kv_bytes < 0.75 * whole * len(prompts) * 256, "they never hold what all tokens take"
        expected = greedy(reference, prompts, 8)
        assert engine.ask(prompts[-1:], 8) == expected[-1:], "alone: its first chunk is split"
        for _ in range(2):
            assert engine.ask(prompts, 8) == expected
            assert engine.ask(prompts[::-1], 8) == expected[::-1]
        assert any(context is not None and context.num_splits for context in engine.contexts())


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
