"""Tiny random checkpoints, made with transformers' own classes: the independent half of every comparison here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}


def _rope(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}


FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + 0.7 * i for i in range(6)]}

# case -> (class prefix, config beyond SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", _rope("dynamic", factor=2.0)),
    "llama-llama3": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3-partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": (
        "Phi3",
        {"original_max_position_embeddings": 256, "max_position_embeddings": 1024, **_rope("longrope", **FACTORS)},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}),
}


def make_tiny(case: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Saves a checkpoint into `folder` and returns the model it was saved from, in fp32. `case`: one of `CASES`, or the
    beginning of the names of a family's classes."""
    prefix, extra = CASES.get(case, (case, {}))
    text = (
        "Text" if prefix in ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe") else ""
    )  # the other classes are those of models that also see
    config_class = getattr(transformers, f"{prefix}{text}Config")
    model_class = getattr(transformers, "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")
    config = config_class(**{"attn_implementation": "eager", **SIZES, **extra, **changes})
    torch.manual_seed(sum(case.encode()))
    model = model_class(config).eval()
    shake(model)
    model.save_pretrained(folder)
    return model


def shake(model: PreTrainedModel) -> None:
    """Moves all weights: norms and biases start as ones and zeros, which would hide mistakes."""
    with torch.no_grad():
        buffers = [
            (name, each)
            for name, each in model.named_buffers()
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar"))
        ]
        for name, parameter in (*model.named_parameters(), *buffers):
            scale = 0.3 if parameter.dim() == 1 else 0.12 if "embed" not in name else 0.5
            parameter.add_(torch.randn_like(parameter) * scale)
