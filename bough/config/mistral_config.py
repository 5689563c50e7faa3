"""Mistral's own layout of a checkpoint, params.json beside consolidated.safetensors -> a config in Hugging Face's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bough.core.errors import ConfigError, UnsupportedModel

_FIELDS: Final[dict[str, str]] = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_EXPERTS: Final[dict[str, str]] = {
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_shared_experts": "n_shared_experts",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "routed_scale": "routed_scaling_factor",
}
_CONTEXT: Final = 32_768
"""Tokens, where params.json doesn't say: what most of these models were trained on."""


def config_from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The config. Raises `UnsupportedModel` for weights that are quantised in this layout."""
    if params.get("quantization") or params.get("quant_config"):
        raise UnsupportedModel(
            what="quantised weights in Mistral's own layout (params.json) can't be read",
            fix="use the checkpoint with config.json and model*.safetensors",
        )
    config = {name: params[key] for key, name in _FIELDS.items() if params.get(key) is not None}
    experts = _inner(params, "moe")
    config |= {name: experts[key] for key, name in _EXPERTS.items() if experts.get(key) is not None}
    config.setdefault("max_position_embeddings", _CONTEXT)
    return {
        **config,
        "architectures": [_architecture(params)],
        "rope_parameters": _rope(params),
        "rope_interleaved": True,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _architecture(params: Mapping[str, Any]) -> str:
    if params.get("kv_lora_rank"):
        return "Mistral4ForCausalLM"
    if params.get("moe"):
        return "MixtralForCausalLM"
    return "Ministral3ForCausalLM" if params.get("llama_4_scaling") else "MistralForCausalLM"


def _rope(params: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.get("rope_theta") or 10_000.0}
    yarn, growth = _inner(params, "yarn"), _inner(params, "llama_4_scaling")
    if yarn:
        original = yarn.get("original_max_position_embeddings")
        rope |= {"rope_type": "yarn", "factor": yarn.get("factor"), "original_max_position_embeddings": original}
        rope |= {"beta_fast": yarn.get("beta", 32.0), "beta_slow": yarn.get("alpha", 1.0)}
        if not yarn.get("apply_scale"):
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # cosines are not scaled
    if growth:
        rope["llama_4_scaling_beta"] = growth.get("beta")
        rope["original_max_position_embeddings"] = growth.get("original_max_position_embeddings")
    return rope


def _inner(params: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = params.get(key) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(
            what=f"params.json has a senseless {key}",
            why=f"it is {found!r} and must be an object",
            fix="fetch it again",
        )
    return found
