"""One architecture of every kind of attention and of feed-forward block, under every way of spreading it over ranks: the
scores of transformers to 1e-4, its greedy answers, and less on each rank. Ranks are threads; the whole engine runs on
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import greedy
from families import DENSE, EARLIER, EXPERTS, LATENTS, STATES
from thread_engine import ThreadEngine
from tiny import make_tiny

from bough.config.model_facts import Moe
from bough.config.shares import rank_kv_values, rank_parameters, rank_state_values

LONG = pytest.mark.long

DENSE_MODELS = ("llama", "gemma3", "olmo2", "bloom", "cohere-qk-norm", "falcon_h1-norm", "mamba2", "falcon_mamba")
"""Grouped queries; windows and norms around each half; norms over all heads; slopes and a plain feed-forward; a norm per
head and blocks whose halves read the same stream."""
EXPERT_MODELS = (
    "qwen3_moe",
    "qwen2_moe",
    "gpt_oss",
    "llama4",
    "deepseek_v3",
    "qwen3_next",
    "granite4",
    "lfm2_moe",
    "minimax",
    "kimi_linear",
)
"""Softmax over experts; a gated shared expert; sinks, windows and experts with biases; chunks, temperatures and a weight on
the input; latents, scored groups and shared experts; layers that keep states; those of Mamba 2, with a norm
across ranks; short convolutions;
attention without a softmax, under a norm across ranks; decays
by channel, beside latents."""
STATE_MODELS = (
    "qwen3_next",
    "granite4",
    "lfm2_moe",
    "minimax",
    "kimi_linear",
    "falcon_h1-norm",
    "mamba2",
    "falcon_mamba",
)
"""Their states can't be shared by position."""
SPREADS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2, "chunked_prefill_size": 64},
    "uneven pp": {"pp_size": 2, "pp_layer_partition": "3,1"},
    "dp attention": {"tp_size": 2, "attn_dp_size": 2},
    "cp": {"tp_size": 2, "attn_cp_size": 2},
    "tp x pp": {"tp_size": 2, "pp_size": 2},
    "ep": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "alltoall"},
    "tp x ep": {"tp_size": 4, "ep_size": 2, "moe_a2a_backend": "allgather"},
    "pp x ep": {"tp_size": 2, "ep_size": 2, "pp_size": 2},
    "cp x dp attention x ep": {
        "tp_size": 4, "attn_cp_size": 2, "attn_dp_size": 2, "ep_size": 4, "moe_a2a_backend": "alltoall",
    },
}  # fmt: skip
NEEDS_EXPERTS = ("ep", "tp x ep", "pp x ep", "cp x dp attention x ep")
SHORT = {
    ("llama", "cp"), ("gemma3", "tp x pp"), ("olmo2", "dp attention"), ("bloom", "tp"), ("qwen2_moe", "pp x ep"),
    ("gpt_oss", "cp x dp attention x ep"), ("llama4", "tp x ep"), ("deepseek_v3", "ep"), ("cohere-qk-norm", "pp"),
    ("qwen3_moe", "dp attention"), ("qwen3_next", "tp x pp"), ("granite4", "tp"), ("gemma3", "uneven pp"),
    ("falcon_h1-norm", "tp"), ("mamba2", "pp"), ("lfm2_moe", "tp"), ("minimax", "tp x pp"), ("falcon_mamba", "tp"),
    ("kimi_linear", "tp"),
}  # fmt: skip
"""Each model once, and each way of spreading once, in `make test`."""
CASES = [
    pytest.param(model, spread, marks=() if (model, spread) in SHORT else LONG)
    for model in (*DENSE_MODELS, *EXPERT_MODELS)
    for spread in SPREADS
    if model in EXPERT_MODELS or spread not in NEEDS_EXPERTS
    if model not in STATE_MODELS or "attn_cp_size" not in SPREADS[spread]
]
PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33], [42], list(range(3, 40)), [(7 * i + 3) % 120 + 3 for i in range(140)]]
NEW_TOKENS = 6


def make(case: str, folder: Path) -> torch.nn.Module:
    prefix, extra = {**DENSE, **EARLIER, **EXPERTS, **LATENTS, **STATES}.get(case, (case, {}))
    return make_tiny(prefix, folder, **extra)


@pytest.mark.parametrize(("model", "spread"), CASES)
def test_spread_over_ranks_it_is_the_same_model(model: str, spread: str, tmp_path: Path) -> None:
    reference = make(model, tmp_path)
    expected = greedy(reference, PROMPTS, NEW_TOKENS)
    with ThreadEngine(tmp_path, **SPREADS[spread]) as engine:
        assert engine.ask(PROMPTS, NEW_TOKENS) == expected
        assert engine.ask(PROMPTS[::-1], NEW_TOKENS) == expected[::-1], "other replicas, cached prefixes"
        for scheduler in range(len(engine.schedulers)):
            prompt = [*PROMPTS[-1][::-1], scheduler]
            with torch.no_grad():
                logits = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1).numpy()
            drawn = [*prompt[1:], int(logits[-1].argmax())]
            scores = engine.scores(prompt, scheduler)
            assert np.abs(np.array(scores) - logits[np.arange(len(prompt)), drawn]).max() <= 1e-4
        check_bytes(engine)


def check_bytes(engine: ThreadEngine) -> None:
    """Each rank holds what was planned for it, which is less than all."""
    facts, layout = engine.decided.facts, engine.layout
    plan = engine.decided.resolved.plan
    tables = 4 * 4 * facts.max_context * max((mixer.head_dim for mixer in facts.kv_mixers), default=0)
    held = [each for each in engine.held if each is not None]
    num_states = 2 + 8 + 2 * 8  # of rows that begin, of padding, of slots, and snapshots
    for rank, each in enumerate(held):
        planned = 4 * rank_parameters(facts, layout, rank)
        assert planned * 0.9 - 4 * facts.hidden * 8 <= each.weight_bytes <= planned * 1.1 + tables
        whole_kv = 4 * rank_kv_values(facts, layout, rank) * (plan.kv_tokens + plan.page_size)
        if len(plan.groups) == 1:
            assert each.kv_bytes == whole_kv
        else:  # pages have one size in all groups, on all stages
            assert each.kv_bytes == plan.kv_bytes
        assert each.state_bytes == 4 * rank_state_values(facts, layout, rank) * num_states
    whole = 4 * facts.num_parameters()
    if layout.heads * layout.pp > 1 or any(layer.ffn is not None for layer in facts.layers):
        assert max(each.weight_bytes for each in held) - tables < 0.9 * whole
    if facts.state_mixers:
        assert plan.state_bytes == max(each.state_bytes for each in held)
        if layout.heads * layout.pp > 1:
            assert plan.state_bytes < 0.7 * 4 * rank_state_values(facts, type(layout)(), 0) * num_states
    values = [rank_kv_values(facts, layout, rank) for rank in range(layout.size)]
    latents = any(mixer.num_kv_heads == 1 for mixer in facts.kv_mixers)  # which ranks hold whole
    stages = min(layout.pp, len(facts.kv_mixers))
    if (1 if latents else layout.heads) * stages * layout.cp > 1:
        assert max(values) < (0.8 if layout.stage_sizes else 0.6) * rank_kv_values(facts, type(layout)(), 0)


def test_the_short_form_covers_everything() -> None:
    assert {model for model, _ in SHORT} == {*DENSE_MODELS, *EXPERT_MODELS}
    assert {spread for _, spread in SHORT} == set(SPREADS)


def test_the_kinds_are_all_there(tmp_path: Path) -> None:
    """Latents and heads, mixtures and dense blocks: by the facts of the models."""
    from bough.config.hf import open_checkpoint
    from bough.models.registry import facts_of

    mixers, blocks = set(), set()
    for number, case in enumerate((*DENSE_MODELS, *EXPERT_MODELS)):
        folder = tmp_path / str(number)
        make(case, folder)
        facts = facts_of(open_checkpoint(str(folder)).config)
        mixers |= {type(mixer).__name__ for mixer in facts.mixers}
        blocks |= {
            "Moe" if isinstance(layer.ffn, Moe) else f"Dense {layer.ffn.gated}" for layer in facts.layers if layer.ffn
        }
    assert {"Gqa", "Mla", "GatedDelta"} <= mixers
    assert blocks == {"Moe", "Dense True", "Dense False"}
