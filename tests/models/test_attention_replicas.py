"""Replicas of attention with feed-forward blocks over all ranks: each replica gets transformers' logits for its own prompts,
with ranks as threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dense_attention import DenseAttention
from families import DENSE, EARLIER, EXPERTS, LATENTS
from tiny import make_tiny

from bough.config.experts import ExpertPlan
from bough.config.hf import open_checkpoint
from bough.config.layout import Layout
from bough.config.shares import rank_kv_values, rank_parameters
from bough.distributed.mesh import Mesh
from bough.distributed.threads import run_ranks
from bough.layers.batch import attention_specs
from bough.layers.spread import TokenSpread
from bough.models.load import build_model
from bough.models.registry import facts_of

PROMPTS = [[[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9], [42]], [[100, 90, 80]], [[7, 7]], [[1, 2, 3, 4, 5], [6]]]
"""Of each replica."""
CPU = torch.device("cpu")

# Kinds of attention and of feed-forward blocks, over replicas of one and of two ranks.
CASES = {
    "llama": (Layout(tp=2, dp=2), "none"),
    "gemma3": (Layout(tp=4, dp=2), "none"),
    "bloom": (Layout(tp=2, dp=2), "none"),
    "olmo2": (Layout(tp=4, dp=2), "none"),
    "qwen2_moe": (Layout(tp=2, dp=2), "none"),
    "qwen3_moe": (Layout(tp=4, dp=2, ep=2), "none"),
    "mixtral": (Layout(tp=2, dp=2, ep=2), "allgather"),
    "qwen2_moe-gathered": (Layout(tp=4, dp=2, ep=4, whole_shared=True), "allgather"),
    "gpt_oss": (Layout(tp=4, dp=4, ep=4), "alltoall"),
    "deepseek_v3": (Layout(tp=4, dp=2, ep=2, whole_shared=True), "alltoall"),
    "llama4": (Layout(tp=4, dp=2, ep=4, whole_shared=True), "alltoall"),
}


SHORT = ("gemma3", "qwen3_moe", "deepseek_v3")


def make(case: str, folder: Path) -> torch.nn.Module:
    prefix, extra = {**DENSE, **EARLIER, **EXPERTS, **LATENTS}.get(case, (case.partition("-")[0], {}))
    return make_tiny(prefix, folder, **extra)


def built(path: Path, mesh: Mesh, kind: str) -> tuple[torch.nn.Module, TokenSpread]:
    spread = TokenSpread(mesh)
    model = build_model(
        open_checkpoint(str(path)), dtype=torch.float32, device=CPU, mesh=mesh, context_length=256,
        experts_plan=ExpertPlan(dispatch=kind), spread=spread,  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(model, torch.nn.Module)
    return model, spread


def logits_of(model: torch.nn.Module, prompts: list[list[int]]) -> np.ndarray:
    batch = DenseAttention(len(prompts)).step(list(enumerate(prompts)), all_logits=True)
    return model.logits(model.forward(batch)).numpy()  # type: ignore[operator]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SHORT else pytest.mark.long) for case in CASES]
)
def test_each_replica_gets_its_own_logits(case: str, tmp_path: Path) -> None:
    layout, kind = CASES[case]
    reference = make(case, tmp_path)
    facts = facts_of(open_checkpoint(str(tmp_path)).config)
    with torch.no_grad():
        expected = [
            torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in prompts]).numpy()
            for prompts in PROMPTS
        ]

    def main(mesh: Mesh) -> tuple[int, np.ndarray, int, int]:
        model, spread = built(tmp_path, mesh, kind)
        spread.begin(13)
        logits = logits_of(model, PROMPTS[mesh.dp.rank])
        assert spread.passed == len(spread.blocks) == facts.num_layers
        weights = sum(parameter.numel() for parameter in model.parameters())
        kv_values = sum((1 if s.latent else 2) * s.num_kv_heads * s.head_dim for s in attention_specs(model))
        return mesh.dp.rank, logits, weights, kv_values

    every = run_ranks(layout, main)
    for rank, (replica, actual, weights, kv_values) in enumerate(every):
        assert np.abs(actual - expected[replica]).max() <= 1e-4, rank
        first = next(each for each in every if each[0] == replica)
        assert np.array_equal(actual, first[1]), f"rank {rank} has other bits than the first of its replica"
        planned = rank_parameters(facts, layout, rank)
        assert abs(weights - planned) <= 0.02 * planned + 2 * facts.hidden + 64 * facts.num_layers
        assert weights < facts.num_parameters()
        assert kv_values == rank_kv_values(facts, layout, rank)


def test_a_replica_that_fails_joins_what_is_left(tmp_path: Path) -> None:
    """It fails in the attention of one layer; the other replica's step ends as if nothing had happened, and so does the
    next step of both."""
    reference = make("qwen3_moe", tmp_path)
    with torch.no_grad():
        expected = [reference(torch.tensor([prompts[0]])).logits[0].numpy() for prompts in PROMPTS[:2]]

    def main(mesh: Mesh) -> list[np.ndarray | None]:
        model, spread = built(tmp_path, mesh, "none")
        seen: list[np.ndarray | None] = []
        for failing in (None, 2, 0, None):
            spread.begin(16)
            layer = model.layers[failing or 0]  # type: ignore[index]
            attention = layer.attn.forward
            if failing is not None and mesh.dp.rank == 1:
                layer.attn.forward = lambda *_: 1 / 0
            try:
                seen.append(logits_of(model, PROMPTS[mesh.dp.rank][:1]))
            except ZeroDivisionError:
                assert spread.join_rest()
                assert spread.passed == len(spread.blocks)
                seen.append(None)
            layer.attn.forward = attention
        return seen

    fine, failed = run_ranks(Layout(tp=2, dp=2), main)
    assert [each is None for each in failed] == [False, True, True, False]
    for replica, seen in enumerate((fine, failed)):
        for logits in seen:
            assert logits is None or np.abs(logits - expected[replica]).max() <= 1e-4
