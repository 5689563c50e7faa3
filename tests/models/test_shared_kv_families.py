"""Families whose layers share KV, or have inputs of their own, against transformers (`families.check_family`), and what only
they do: layers that keep nothing, and passes that are narrowed before the last layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from families import IN_SEVENS, PROMPTS, SHARED_KV, check_family
from in_process import InProcess, Setup
from narrowing_attention import NarrowingAttention
from safetensors.torch import load_file, save_file
from tiny import SIZES, make_tiny

from bough.config.concerns import Config, ModelConfig
from bough.config.fields import Fields
from bough.config.hf import open_checkpoint
from bough.config.kv_groups import lifetimes_of, plan_groups
from bough.config.layout import Layout
from bough.config.model_facts import ModelFacts
from bough.core.errors import ConfigError
from bough.core.kv import Grows, Window
from bough.engine.decide import check_servable
from bough.layers.batch import Model, attention_specs
from bough.layers.decoder import Decoder
from bough.models import gemma3n, gemma4
from bough.models.load import build_model
from bough.models.registry import facts_of

CPU = torch.device("cpu")
STEPS = [[(0, [5, 17, 99, 3, 64, 2]), (1, [42])], [(1, [7, 8]), (0, [120, 33, 5, 5, 77])], [(0, [11]), (1, [9])]]
SHARING = [case for case, (_, extra) in SHARED_KV.items() if extra.get("num_kv_shared_layers")]


def made(case: str, folder: Path) -> tuple[Model, ModelFacts]:
    prefix, extra = SHARED_KV[case]
    make_tiny(prefix, folder, **extra)
    checkpoint = open_checkpoint(str(folder))
    return build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=128), facts_of(checkpoint.config)


@pytest.mark.parametrize("case", SHARED_KV)
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*SHARED_KV[case], tmp_path)


@pytest.mark.parametrize("case", SHARING)
def test_the_kernels_of_cpus_and_a_retraction_change_nothing(case: str, tmp_path: Path) -> None:
    model, _ = made(case, tmp_path)
    expected = InProcess(model, SIZES["vocab_size"], IN_SEVENS).generate(PROMPTS)
    assert InProcess(model, SIZES["vocab_size"], IN_SEVENS).generate_with_a_retraction(PROMPTS) == expected
    compiled = Setup(attention="cpu", chunk_tokens=7, page_size=4, context_length=128)
    assert InProcess(model, SIZES["vocab_size"], compiled).generate(PROMPTS) == expected


@pytest.mark.parametrize("case", SHARED_KV)
def test_layers_behind_the_last_kv_compute_what_is_read_alone(case: str, tmp_path: Path) -> None:
    model, facts = made(case, tmp_path)
    assert isinstance(model, Decoder)
    plain, narrowing = DenseAttention(2), NarrowingAttention(2, len(facts.kv_mixers))
    widths: list[int] = []
    model.layers[-1].mlp.register_forward_hook(lambda _module, _given, out: widths.append(len(out.x_TF)))
    with torch.no_grad():
        for queries in STEPS:
            expected = model.logits(model.forward(plain.step(queries)))
            actual = model.logits(model.forward(narrowing.step(queries)))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert narrowing.narrowed == len(STEPS)
    assert widths[1::2] == [2, 2, 2]


def test_layers_that_share_kv_keep_none(tmp_path: Path) -> None:
    model, facts = made("gemma3n", tmp_path)
    assert isinstance(model, torch.nn.Module)
    assert [layer.kv_from for layer in facts.layers] == [None, None, None, 1, 2, 1]
    assert [spec.layer for spec in attention_specs(model)] == [0, 1, 2]
    assert lifetimes_of(facts, 128) == [Window(9), Grows(), Window(9)]
    plan = plan_groups(facts, Layout(), context=128, page_size=4)
    assert sorted(layer for group in plan.groups for line in group.layers for layer in line) == [0, 1, 2]
    whole = sum(sum(mixer.planes) for mixer in facts.mixers if hasattr(mixer, "planes"))
    assert sum(sum(mixer.planes) for mixer in facts.kv_mixers) == whole // 2


def test_pages_of_narrow_and_wide_heads_have_equal_bytes(tmp_path: Path) -> None:
    """Global layers keep as much of a token as windowed ones, or twice as much: both make lines of one pool."""
    for case, parts in (("gemma4-keys-are-values", [1, 1]), ("gemma4", [2, 1])):
        _, facts = made(case, tmp_path / case)
        plan = plan_groups(facts, Layout(), context=128, page_size=4)
        assert not plan.because
        assert [group.parts for group in plan.groups] == parts
        assert [group.lifetime for group in plan.groups] == [Grows(), Window(9)]


def test_unread_keys_in_a_checkpoint_are_passed_over(tmp_path: Path) -> None:
    """Published files of Gemma 3n hold the keys and values of layers that read others'."""
    model, _ = made("gemma3n", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("k_proj", "v_proj"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = torch.randn(32, 48)
    tensors["model.layers.4.self_attn.k_norm.weight"] = torch.randn(16)
    save_file(tensors, file, {"format": "pt"})
    again = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=CPU, context_length=128)
    with torch.no_grad():
        both = [each.logits(each.forward(DenseAttention(2).step(STEPS[0]))) for each in (model, again)]
    assert torch.equal(*both)


@pytest.mark.parametrize("case", ["gemma3n", "gemma4"])
def test_the_language_model_of_a_model_that_sees_and_hears(case: str, tmp_path: Path) -> None:
    """As published: its config inside another, its tensors below `model.language_model`, beside towers."""
    model, _ = made(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (name,) = config.pop("architectures")
    name = name.replace("ForCausalLM", "ForConditionalGeneration")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "text_config": config}))
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in load_file(file).items()}
    parts = {
        "gemma3n": ("vision_tower.timm_model.blocks.2.9.attn.key.norm", "audio_tower.conformer.0.norm",
                    "embed_vision.embedding", "embed_audio.soft_embedding_norm"),
        "gemma4": ("audio_tower.something", "embed_audio.something"),
    }  # fmt: skip
    for part in parts[case]:
        tensors[f"model.{part}.weight"] = torch.zeros(3)
    save_file(tensors, file, {"format": "pt"})
    inside = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=CPU, context_length=128)
    with torch.no_grad():
        both = [each.logits(each.forward(DenseAttention(2).step(STEPS[0]))) for each in (model, inside)]
    assert torch.equal(*both)


@pytest.mark.parametrize(("field", "flag"), [("pp_size", "--pp-size"), ("attn_cp_size", "--attn-cp-size")])
def test_what_shared_kv_does_not_allow_is_refused(field: str, flag: str, tmp_path: Path) -> None:
    made("gemma4", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    config = Config(model=ModelConfig(model=str(tmp_path)))
    config = replace(config, parallel=replace(config.parallel, **{field: 2}))
    with pytest.raises(ConfigError, match=f"{flag} does not work with Gemma4ForCausalLM"):
        check_servable(config, checkpoint, facts_of(checkpoint.config), None)


PUBLISHED = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 262_144, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "max_position_embeddings": 131_072, "num_kv_shared_layers": 20, "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
}  # fmt: skip


def test_facts_of_a_published_config() -> None:
    """Of 35 layers 15 keep KV: 3 global ones with heads of 512, the others with windows of 512 tokens."""
    facts = gemma4.read(Fields(PUBLISHED))
    assert [mixer.head_dim for mixer in facts.kv_mixers] == [256, 256, 256, 256, 512] * 3
    assert {layer.kv_from for layer in facts.layers[15:]} == {13, 14}
    plan = plan_groups(facts, Layout(), context=131_072, page_size=64)
    assert not plan.because
    assert facts.tie_embeddings
    assert facts.mixers[4].rope is not None
    assert (facts.mixers[4].rope.kind, facts.mixers[4].rope.share) == ("proportional", 0.25)


@pytest.mark.parametrize(
    ("module", "changes", "named"),
    [
        (gemma4, {"num_kv_shared_layers": 34}, "num_kv_shared_layers"),
        (gemma4, {"num_attention_heads": 7, "num_key_value_heads": 2}, "num_key_value_heads"),
        (gemma3n, {"altup_active_idx": 4}, "altup_active_idx"),
        (gemma3n, {"activation_sparsity_pattern": [1.5] * 35}, "activation_sparsity_pattern"),
        (gemma3n, {"layer_types": ["chunked_attention"] * 35}, "chunked_attention"),
    ],
)
def test_broken_configs_are_refused_by_the_field(module: object, changes: dict[str, object], named: str) -> None:
    config = json.loads(json.dumps({**PUBLISHED, **changes}))
    with pytest.raises(ConfigError) as caught:
        module.read(Fields(config))  # type: ignore[attr-defined]
    assert named in f"{caught.value.what} {caught.value.why} {caught.value.fix}"
