"""GGUF metadata -> a config in Hugging Face's form, so that all other code handles one kind of checkpoint only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bough.config.gguf_header import GgufHeader, TensorInfo
from bough.core.errors import ConfigError, UnsupportedModel

_Tensors = dict[str, tuple[Path, TensorInfo]]

# general.architecture -> (class, model_type)
_ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}

_FIELDS: Final[dict[str, str]] = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "shortconv.l_cache": "conv_L_cache",
}
# Of the largest Gemma 2 and 3 the metadata hold the width of a head, but attention is scaled by hidden / heads.
_SCALED_BY_HIDDEN: Final = {("gemma2", 46), ("gemma3", 62)}

_SAMPLING: Final[dict[str, str]] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def config_from_gguf(headers: Sequence[GgufHeader], files: Sequence[Path]) -> dict[str, Any]:
    """The config of a model in one file or several. Raises UnsupportedModel for an architecture without translation."""
    metadata = headers[0].metadata
    tensors = {
        name: (file, info) for header, file in zip(headers, files, strict=True) for name, info in header.tensors.items()
    }
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise UnsupportedModel(
            what=f"GGUF files of architecture {arch!r} can't be served",
            why=f"known: {', '.join(sorted(_ARCHITECTURES))}",
            fix="use the model's safetensors checkpoint",
        )
    architecture, model_type = _ARCHITECTURES[arch]
    if arch == "llama" and metadata.get("llama.expert_count"):
        architecture, model_type = "MixtralForCausalLM", "mixtral"
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    for field, key in _FIELDS.items():
        value = metadata.get(f"{arch}.{field}")
        if isinstance(value, list):
            if arch.startswith("lfm2") and key == "num_key_value_heads":  # layers without heads convolve
                config["layer_types"] = ["full_attention" if heads else "conv" for heads in value]
                value = [heads for heads in value if heads] or [1]
            value = _one_value(value, f"{arch}.{field}")
        if value is not None:
            config[key] = value
    if "token_embd.weight" not in tensors:
        raise ConfigError(
            what=f"{files[0]} holds no model",
            why="it has no tensor token_embd.weight",
            fix="name the file with the weights",
        )
    config["vocab_size"] = tensors["token_embd.weight"][1].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = metadata.get("tokenizer.ggml.eos_token_id")
    config |= _rope(metadata, tensors, arch, config)
    config |= _of_architecture(metadata, arch, config)
    return config


def generation_config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """Sampling defaults and the ids that end an answer."""
    metadata = header.metadata
    generation = {key: metadata[field] for field, key in _SAMPLING.items() if field in metadata}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    generation["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return generation


def _one_value(values: list[Any], field: str) -> Any:
    if len(set(values)) == 1:
        return values[0]
    raise UnsupportedModel(
        what=f"the GGUF file gives {field} by layer", why="layers of different shapes can't be served"
    )


def _of_architecture(metadata: dict[str, Any], arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Facts that llama.cpp knows about an architecture and that are not in the file."""
    extra: dict[str, Any] = {}
    if experts := metadata.get(f"{arch}.expert_count"):
        extra["num_experts"] = extra["num_local_experts"] = experts
        extra["norm_topk_prob"] = arch != "qwen2moe"
    if arch == "lfm2":
        extra["block_auto_adjust_ff_dim"] = False  # what the file says of feed-forward blocks is their width
    if (arch, config.get("num_hidden_layers")) in _SCALED_BY_HIDDEN:
        extra["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    elif arch.startswith("gemma"):
        extra["query_pre_attn_scalar"] = config.get("head_dim", 256)
    return extra


def _rope(metadata: dict[str, Any], tensors: _Tensors, arch: str, config: dict[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads") or 1
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    rotary_dim = metadata.get(f"{arch}.rope.dimension_count") or head_dim
    params: dict[str, Any] = {}
    if base := metadata.get(f"{arch}.rope.freq_base"):
        params["rope_theta"] = base
    if head_dim and rotary_dim != head_dim:
        params["partial_rotary_factor"] = rotary_dim / head_dim
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    scaling = metadata.get(f"{arch}.rope.scaling.type")
    if "rope_freqs.weight" in tensors:
        # Llama 3's stretched frequencies come as divisors: longrope with one set of factors for every length.
        factors = _floats(tensors, "rope_freqs.weight")
        params |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    elif "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        params |= {
            "rope_type": "longrope",
            "long_factor": _floats(tensors, "rope_factors_long.weight"),
            "short_factor": _floats(tensors, "rope_factors_short.weight"),
            "attention_factor": metadata.get(f"{arch}.rope.scaling.attn_factor"),
        }
    elif scaling in ("linear", "yarn"):
        params |= {"rope_type": scaling, "factor": metadata.get(f"{arch}.rope.scaling.factor")}
    if original:
        params["original_max_position_embeddings"] = original
    if arch == "gemma3":
        local = {"rope_theta": metadata.get(f"{arch}.rope.freq_base_swa") or 10_000.0}
        return {"rope_parameters": {"full_attention": params, "sliding_attention": local}}
    return {"rope_parameters": params}


def _floats(tensors: _Tensors, name: str) -> list[float]:
    path, info = tensors[name]
    if info.kind != "F32":
        raise ConfigError(what=f"{path}: {name} is stored as {info.kind}", why="it must be F32", fix="convert it again")
    values: list[float] = np.fromfile(path, "<f4", count=info.nbytes // 4, offset=info.offset).tolist()
    return values
