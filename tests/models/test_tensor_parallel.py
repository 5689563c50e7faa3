"""Ranks that split each layer give the logits of one, for architectures that split in different ways. Ranks are threads
here; `tests/e2e` has them as processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import DenseAttention
from families import DENSE, EARLIER, EXPERTS, LATENTS, SHARED_KV
from gguf_files import write_gguf
from quantised_files import quantise_checkpoint
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.config.layout import Layout
from bough.config.model_facts import Moe
from bough.config.shares import rank_kv_values, rank_parameters
from bough.core.errors import ConfigError
from bough.distributed.mesh import Mesh
from bough.distributed.threads import run_ranks
from bough.layers.batch import attention_specs
from bough.layers.decoder import Decoder
from bough.layers.moe import Experts
from bough.models.load import build_model
from bough.models.registry import facts_of

PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11], [42], [100, 90, 80]]
CPU = torch.device("cpu")

# case -> changes to it. One key-value head over two ranks: both hold it. A vocabulary of 131: the shares differ.
SPLITS = {
    "llama": {},
    "llama-tied-bias": {"num_key_value_heads": 1},
    "phi3": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
}


def logits_of_ranks(path: Path, layout: Layout) -> list[np.ndarray]:
    """The logits that each rank has in the end."""

    def main(mesh: Mesh) -> Any:
        checkpoint = open_checkpoint(str(path))
        scheme = "gguf-exact" if checkpoint.kind == "gguf" else "auto"
        model = build_model(
            checkpoint, dtype=torch.float32, device=CPU, mesh=mesh, quantization=scheme, context_length=256
        )
        batch = DenseAttention(len(PROMPTS)).step(list(enumerate(PROMPTS)), all_logits=True)
        return model.logits(model.forward(batch)).numpy()

    return run_ranks(layout, main)


def compare(path: Path, reference: torch.nn.Module, layout: Layout) -> None:
    with torch.no_grad():
        expected = torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]).numpy()
    every = logits_of_ranks(path, layout)
    for rank, actual in enumerate(every):
        assert actual.shape == expected.shape
        assert np.abs(actual - expected).max() <= 1e-4, rank
        assert np.array_equal(actual, every[0]), f"rank {rank} has other bits"


@pytest.mark.parametrize("case", SPLITS)
def test_two_ranks_give_the_logits_of_one(case: str, tmp_path: Path) -> None:
    compare(tmp_path, make_tiny(case, tmp_path, **SPLITS[case]), Layout(tp=2))


# What else is cut by head or by rank: norms of all heads together, with a key-value head that both ranks hold; norms of each
# head; slopes; sinks and experts' biases; latents, which every rank keeps; means over all inner units; keys that are values.
FAMILIES = {
    "olmo2": (DENSE["olmo2"], {"num_key_value_heads": 1}),
    "cohere": (DENSE["cohere-qk-norm"], {}),
    "bloom": (EARLIER["bloom"], {}),
    "gpt_oss": (EXPERTS["gpt_oss"], {}),
    "deepseek_v3": (LATENTS["deepseek_v3"], {}),
    "deepseek_v32": (LATENTS["deepseek_v32-chosen"], {}),
    "gemma3n": (SHARED_KV["gemma3n"], {}),
    "gemma4": (SHARED_KV["gemma4-keys-are-values"], {}),
    "gemma4-experts": (SHARED_KV["gemma4-experts"], {}),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_two_ranks_give_the_logits_of_one_in_every_kind_of_attention(case: str, tmp_path: Path) -> None:
    (prefix, extra), changes = FAMILIES[case]
    compare(tmp_path, make_tiny(prefix, tmp_path, **{**extra, **changes}), Layout(tp=2))


def test_packed_weights_are_split(tmp_path: Path) -> None:
    """A GGUF file whose blocks end at a rank's share of the attention output, and don't at that of the feed-forward."""
    reference = make_tiny("llama", tmp_path, hidden_size=64, intermediate_size=96)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = write_gguf(tmp_path, config, tmp_path / "tiny.gguf", "Q4_1", {"v_proj": "Q8_0", "lm_head": "Q8_0"})
    reference.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    compare(tmp_path / "tiny.gguf", reference, Layout(tp=2))


@pytest.mark.parametrize(
    ("form", "case", "layout"),
    [
        ("fp8-block", "llama", Layout(tp=2)),
        ("fp8-static", "llama", Layout(tp=2)),
        ("fp8-block", "qwen3_moe", Layout(tp=2)),
        ("fp8-channel", "qwen3_moe", Layout(tp=2, ep=2)),
    ],
)
def test_quantised_weights_are_split(form: str, case: str, layout: Layout, tmp_path: Path) -> None:
    """Formats that a CPU multiplies without rounding activations: ranks must agree with one to the last digits."""
    make_tiny(case, tmp_path, hidden_size=64, intermediate_size=128, moe_intermediate_size=64)
    quantise_checkpoint(tmp_path, form)
    (expected,) = logits_of_ranks(tmp_path, Layout())
    for rank, actual in enumerate(logits_of_ranks(tmp_path, layout)):
        assert np.abs(actual - expected).max() <= 1e-4, rank


# What does not divide: 7 query heads a key-value head, over 3 ranks (two share a key-value head) and over 4; 3 key-value
# heads over 2; inner units that are prime.
UNEVEN = {
    "more ranks than keys": (
        {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 56},
        3,
    ),
    "queries of one key split": (
        {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 56},
        4,
    ),
    "keys split unevenly": ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, 2),
    "units": ({"intermediate_size": 83}, 2),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_what_does_not_divide_is_split_unevenly(case: str, tmp_path: Path) -> None:
    changes, ranks = UNEVEN[case]
    compare(tmp_path, make_tiny("llama", tmp_path, **changes), Layout(tp=ranks))


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    compare(tmp_path, make_tiny("qwen3_moe", tmp_path, moe_intermediate_size=20), Layout(tp=3))


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("qwen3_moe", Layout(tp=2, ep=2)),
        ("qwen2_moe", Layout(tp=2, ep=2)),
        ("mixtral", Layout(tp=3, ep=3)),
        ("qwen3_moe", Layout(tp=4, ep=2)),
    ],
)
def test_ranks_that_hold_different_experts(case: str, layout: Layout, tmp_path: Path) -> None:
    compare(tmp_path, make_tiny(case, tmp_path), layout)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("llama", Layout(pp=2)),
        ("llama-tied-bias", Layout(pp=3)),
        ("gemma3", Layout(pp=2)),
        ("qwen3_moe", Layout(pp=2, tp=2, ep=2)),
    ],
)
def test_stages_pass_the_stream_on(case: str, layout: Layout, tmp_path: Path) -> None:
    reference = make_tiny(case, tmp_path)
    with torch.no_grad():
        expected = torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]).numpy()
    facts = facts_of(open_checkpoint(str(tmp_path)).config)

    def main(mesh: Mesh) -> tuple[np.ndarray | None, int, int]:
        model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=CPU, mesh=mesh)
        assert isinstance(model, Decoder)
        hidden = model.forward(DenseAttention(len(PROMPTS)).step(list(enumerate(PROMPTS)), all_logits=True))
        kv_values = sum(2 * spec.num_kv_heads * spec.head_dim for spec in attention_specs(model))
        weights = sum(parameter.numel() for parameter in model.parameters())
        return model.logits(hidden).numpy() if model.is_last else None, weights, kv_values

    every = run_ranks(layout, main)
    for rank, (logits, weights, kv_values) in enumerate(every):
        assert (logits is not None) == (layout.place(rank)["pp"] == layout.pp - 1)
        if logits is not None:
            assert np.abs(logits - expected).max() <= 1e-4, rank
        assert kv_values == rank_kv_values(facts, layout, rank) < rank_kv_values(facts, Layout(), 0)
        assert weights <= 1.1 * rank_parameters(facts, layout, rank) < facts.num_parameters()


def test_experts_are_held_once(tmp_path: Path) -> None:
    """Each expert is on one rank, and read there alone."""
    make_tiny("qwen3_moe", tmp_path)
    facts, layout = facts_of(open_checkpoint(str(tmp_path)).config), Layout(tp=2, ep=2)

    def main(mesh: Mesh) -> tuple[int, int]:
        model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=CPU, mesh=mesh)
        assert isinstance(model, torch.nn.Module)
        experts = [each for each in model.modules() if isinstance(each, Experts)]
        held = sum(parameter.numel() for each in experts for parameter in each.parameters())
        return sum(parameter.numel() for parameter in model.parameters()), held

    mixtures = [layer.ffn for layer in facts.layers if isinstance(layer.ffn, Moe)]
    whole = sum(3 * facts.hidden * ffn.intermediate * ffn.num_experts for ffn in mixtures)
    for rank, (weights, held) in enumerate(run_ranks(layout, main)):
        assert held == whole // 2
        assert abs(weights - rank_parameters(facts, layout, rank)) <= 2 * facts.hidden + 64 * facts.num_layers


def test_ranks_hold_what_was_planned(tmp_path: Path) -> None:
    """Weights and KV of each rank, in numbers, for a split that is not even."""
    make_tiny("llama", tmp_path, num_attention_heads=14, num_key_value_heads=2, head_dim=8, hidden_size=56)
    layout = Layout(tp=3)

    def main(mesh: Mesh) -> tuple[int, int]:
        model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=CPU, mesh=mesh)
        assert isinstance(model, torch.nn.Module)
        kv_values = sum(2 * spec.num_kv_heads * spec.head_dim for spec in attention_specs(model))
        return sum(parameter.numel() for parameter in model.parameters()), kv_values

    facts = facts_of(open_checkpoint(str(tmp_path)).config)
    whole = facts.num_parameters()
    for rank, (weights, kv_values) in enumerate(run_ranks(layout, main)):
        assert kv_values == rank_kv_values(facts, layout, rank) == facts.num_layers * 2 * 8
        planned = rank_parameters(facts, layout, rank)
        assert abs(weights - planned) <= 2 * facts.hidden, "the last rank's part of the vocabulary is smaller"
        assert weights < 0.55 * whole


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with pytest.raises(ConfigError, match="heads can't be split over 5 ranks") as caught:
        build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=CPU, mesh=Mesh.tensor(0, 5))
    assert "--tp-size of at most 4" in caught.value.fix
