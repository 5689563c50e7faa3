"""Families that transformers has no class for, but one that computes the same: its weights, by the family's names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import HALF, LATENT_SIZES, MINIMAX, SOME_EXPERTS, V3_EXPERTS, YARN, check_answers
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from torch import Tensor

from bough.config.hf import open_checkpoint
from bough.models.load import build_model
from bough.models.registry import facts_of

Weights = dict[str, Tensor]


class Renamed(NamedTuple):
    """A family by the class that computes the same."""

    prefix: str
    """Of the class in transformers..."""
    extra: dict[str, Any]
    """...and what its tiny config needs."""
    names: dict[str, str]
    """Patterns of its tensors' names, and what the family calls them."""
    config: dict[str, Any]
    """The family's config, beyond what is called alike; a value that is None is left out."""
    change: Callable[[Weights], Weights] = lambda weights: weights
    """What else differs in the tensors, by the family's names."""


def fused(target: str, *parts: str) -> Callable[[Weights], Weights]:
    """Joins tensors of a layer, one below the other."""

    def change(weights: Weights) -> Weights:
        made = dict(weights)
        for name in weights:
            if parts[0] in name:
                pieces = [made.pop(name.replace(parts[0], part)) for part in parts]
                made[name.replace(parts[0], target)] = torch.cat(pieces)
        return made

    return change


def by_kv_head(weights: Weights) -> Weights:
    """InternLM 2's: for each of 2 key-value heads its 2 queries, its key and its value, of 12 rows each."""
    made = dict(weights)
    for name in weights:
        if ".wq." in name:
            q, k, v = (made.pop(name.replace(".wq.", part)) for part in (".wq.", ".wk.", ".wv."))
            groups = [
                torch.cat((q[24 * i : 24 * i + 24], k[12 * i : 12 * i + 12], v[12 * i : 12 * i + 12])) for i in (0, 1)
            ]
            made[name.replace(".wq.", ".wqkv.")] = torch.cat(groups)
    return made


def ungated(weights: Weights) -> Weights:
    """Qwen2-MoE halves what its shared expert gives if the expert's gate is 0."""
    made = {name: tensor for name, tensor in weights.items() if "shared_expert_gate" not in name}
    return {name: tensor / 2 if "shared_experts.down_proj" in name else tensor for name, tensor in made.items()}


def with_drafts(weights: Weights) -> Weights:
    return {**weights, "model.mtp_layers.0.input_proj.weight": torch.zeros(4, 4)}


QKV = fused("query_key_value", "q_proj", "k_proj", "v_proj")
BAILING = {
    r"model\.embed_tokens": "model.word_embeddings",
    r"self_attn\.q_norm": "attention.query_layernorm",
    r"self_attn\.k_norm": "attention.key_layernorm",
    r"self_attn\.o_proj": "attention.dense",
    r"self_attn\.": "attention.",
    r"gate\.e_score_correction_bias": "gate.expert_bias",
    r"shared_expert\.": "shared_experts.",
}
FAMILIES: dict[str, Renamed] = {
    "exaone": Renamed(
        "Llama",
        {"head_dim": 12},
        {
            r"model\.embed_tokens": "transformer.wte",
            r"model\.norm": "transformer.ln_f",
            r"model\.layers": "transformer.h",
            r"input_layernorm": "ln_1",
            r"post_attention_layernorm": "ln_2",
            r"self_attn\.o_proj": "attn.attention.out_proj",
            r"self_attn": "attn.attention",
            r"mlp\.gate_proj": "mlp.c_fc_0",
            r"mlp\.up_proj": "mlp.c_fc_1",
            r"mlp\.down_proj": "mlp.c_proj",
        },
        {
            "architectures": ["ExaoneForCausalLM"],
            "model_type": "exaone",
            "num_layers": 4,
            "num_hidden_layers": None,
            "layer_norm_epsilon": 1e-6,
            "rms_norm_eps": None,
            "activation_function": "silu",
            "hidden_act": None,
        },
    ),
    "bailing": Renamed(
        "Qwen2Moe",
        {**SOME_EXPERTS, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0], "norm_topk_prob": True},
        BAILING,
        {
            "architectures": ["BailingMoeForCausalLM"],
            "model_type": "bailing_moe",
            "use_qkv_bias": True,
            "num_shared_experts": 2,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-6,
        },
        lambda weights: QKV(ungated(weights)),
    ),
    "bailing2": Renamed(
        "Glm4Moe",
        {**V3_EXPERTS, "head_dim": 16, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "rope_parameters": HALF},
        BAILING,
        {
            "architectures": ["BailingMoeV2ForCausalLM"],
            "model_type": "bailing_moe_v2",
            "num_experts": 8,
            "n_routed_experts": None,
            "num_shared_experts": 2,
            "n_shared_experts": None,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "rope_parameters": None,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        QKV,
    ),
    "deepseek_v1": Renamed(
        "Qwen2Moe",
        {**SOME_EXPERTS, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0], "qkv_bias": False},
        {r"shared_expert\.": "shared_experts."},
        {
            "architectures": ["DeepseekForCausalLM"],
            "model_type": "deepseek",
            "n_routed_experts": 6,
            "num_experts": None,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
        },
        ungated,
    ),
    "mimo": Renamed("Qwen2", {}, {}, {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}, with_drafts),
    "internlm2": Renamed(
        "Llama",
        {"attention_bias": False},
        {
            r"model\.embed_tokens": "model.tok_embeddings",
            r"lm_head": "output",
            r"input_layernorm": "attention_norm",
            r"post_attention_layernorm": "ffn_norm",
            r"self_attn\.(\w)_proj": r"attention.w\1",
            r"mlp\.gate_proj": "feed_forward.w1",
            r"mlp\.up_proj": "feed_forward.w3",
            r"mlp\.down_proj": "feed_forward.w2",
        },
        {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
        by_kv_head,
    ),
    "internlm3": Renamed(
        "Llama",
        {"attention_bias": True, "mlp_bias": True},
        {},
        {
            "architectures": ["InternLM3ForCausalLM"],
            "model_type": "internlm3",
            "attention_bias": None,
            "mlp_bias": None,
            "bias": True,
            "qkv_bias": True,
        },
    ),
    "minimax_m1": Renamed(
        "MiniMax",
        {**MINIMAX, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        {},
        {
            "architectures": ["MiniMaxM1ForCausalLM"],
            "model_type": "minimax_m1",
            **{key: None for key in MINIMAX if key.endswith("_factor")},
            "layer_types": None,
            "rope_parameters": None,
            "rope_theta": 1e7,
            "rotary_dim": 12,
            "postnorm": True,
            "attn_type_list": [0, 0, 1, 0],
            "shared_intermediate_size": [0, 0, 0, 0],
            "layernorm_full_attention_alpha": 1.3,
            "layernorm_full_attention_beta": 0.8,
            "layernorm_linear_attention_alpha": 1.2,
            "layernorm_linear_attention_beta": 0.7,
            "layernorm_mlp_alpha": 1.1,
            "layernorm_mlp_beta": 0.9,
        },
    ),
    "minicpm": Renamed(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "attention_multiplier": 12**-0.5,
            "tie_word_embeddings": True,
        },
        {},
        {
            "architectures": ["MiniCPMForCausalLM"],
            "model_type": "minicpm",
            "scale_emb": 3.0,
            "scale_depth": 1.4,
            "dim_model_base": 24,
            "embedding_multiplier": None,
            "residual_multiplier": None,
            "logits_scaling": None,
            "attention_multiplier": None,
            "tie_word_embeddings": None,
        },
    ),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_answers_as_the_class_that_computes_the_same(case: str, tmp_path: Path) -> None:
    family = FAMILIES[case]
    reference = make_tiny(family.prefix, tmp_path, **family.extra)
    for name, parameter in reference.named_parameters():
        if "shared_expert_gate" in name:
            parameter.data.zero_()
    reference.save_pretrained(tmp_path)
    rewrite(tmp_path, family)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    assert isinstance(model, torch.nn.Module)
    held, facts = sum(parameter.numel() for parameter in model.parameters()), facts_of(checkpoint.config)
    assert abs(held - facts.num_parameters()) <= 0.002 * held
    check_answers(reference, model, cached=28 if facts.state_mixers else 29)  # states: in whole pages of 4


def rewrite(folder: Path, family: Renamed) -> None:
    """Makes a checkpoint in `folder` one of the family."""
    weights = load_file(folder / "model.safetensors")
    for pattern, target in family.names.items():
        weights = {re.sub(pattern, target, name): tensor for name, tensor in weights.items()}
    save_file({name: each.contiguous() for name, each in family.change(weights).items()}, folder / "model.safetensors")
    config = {**json.loads((folder / "config.json").read_text()), **family.config}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


OWN_LAYOUT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}, {}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        {
            "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "apply_scale": False},
            "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 64},
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **V3_EXPERTS,
            **LATENT_SIZES,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        {
            **{key: LATENT_SIZES[key] for key in LATENT_SIZES if key != "num_key_value_heads"},
            "moe": {
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "expert_hidden_dim": 40,
                "num_shared_experts": 2,
                "first_k_dense_replace": 1,
                "routed_scale": 1.7,
            },
            "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "apply_scale": False},
            "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 64},
        },
    ),
}
OWN_NAMES = {
    r"^model\.embed_tokens": "tok_embeddings",
    r"^lm_head": "output",
    r"^model\.": "",
    r"\.input_layernorm": ".attention_norm",
    r"\.post_attention_layernorm": ".ffn_norm",
    r"self_attn\.q_a_layernorm": "attention.q_a_norm",
    r"self_attn\.kv_a_layernorm": "attention.kv_a_norm",
    r"self_attn\.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    r"self_attn\.(\w+?)_proj": r"attention.w\1",
    r"block_sparse_moe": "feed_forward",
    r"mlp\.(gate\.|(?:shared_)?experts)": r"\1",
    r"mlp": "feed_forward",
    r"gate_proj": "w1",
    r"down_proj": "w2",
    r"up_proj": "w3",
}


@pytest.mark.parametrize("case", OWN_LAYOUT)
def test_mistrals_own_layout(case: str, tmp_path: Path) -> None:
    """params.json and consolidated.safetensors, with heads whose neighbouring values are rotated together."""
    prefix, extra, stated = OWN_LAYOUT[case]
    reference = make_tiny(prefix, tmp_path, **extra)
    config = reference.config
    width = config.head_dim or 12
    weights = {name: in_pairs(name, each, width) for name, each in load_file(tmp_path / "model.safetensors").items()}
    weights = {name: each for whole, stack in weights.items() for name, each in unstacked(whole, stack).items()}
    for pattern, target in OWN_NAMES.items():
        weights = {re.sub(pattern, target, name): each for name, each in weights.items()}
    weights["vision_encoder.ln_pre.weight"] = torch.zeros(4)
    save_file({name: each.contiguous() for name, each in weights.items()}, tmp_path / "consolidated.safetensors")
    params = {
        "dim": 48, "n_layers": 4, "hidden_dim": 80, "n_heads": 4, "n_kv_heads": config.num_key_value_heads,
        "head_dim": width, "norm_eps": config.rms_norm_eps, "vocab_size": 131, "max_seq_len": 256,
        "rope_theta": config.rope_parameters["rope_theta"], **stated,
    }  # fmt: skip
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).unlink()
    (tmp_path / "params.json").write_text(json.dumps(params))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.eos_ids == (2,)
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    check_answers(reference, model)


def in_pairs(name: str, weight: Tensor, width: int) -> Tensor:
    """Rows of queries and keys in the order that Mistral's code rotates: halves become pairs."""
    if not name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
        return weight
    heads = weight.shape[0] // width
    return weight.view(heads, 2, width // 2, -1).transpose(1, 2).reshape(weight.shape)


def unstacked(name: str, weight: Tensor) -> Weights:
    """Experts one by one."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight}
    stem = name.rpartition(".")[0]
    made: Weights = {}
    for expert, each in enumerate(weight):
        names = ("down_proj",) if name.endswith("down_proj") else ("gate_proj", "up_proj")
        parts = zip(names, each.chunk(len(names)), strict=True)
        made |= {f"{stem}.{expert}.{part}.weight": matrix for part, matrix in parts}
    return made
