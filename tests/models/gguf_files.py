"""Writes a tiny checkpoint as a GGUF file, the way llama.cpp's converter does, with the gguf package's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

Array = npt.NDArray[Any]

# model_type -> GGUF architecture
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
}


def write_gguf(
    folder: Path, config: dict[str, Any], path: Path, kind: str = "F32", kinds: dict[str, str] | None = None
) -> dict[str, Array]:
    """Converts the safetensors in `folder`. Matrices are stored as `kind`, or as `kinds` says for a part of their name.

    Returns the weights a reader must find, under their Hugging Face names: what the stored ones dequantise to.
    """
    arch = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    arch_id = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(arch_id, config["num_hidden_layers"])
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    for hf_name, value in _stack_experts(tensors).items():
        stored = _convert(hf_name, value, arch, config)
        known = hf_name.removeprefix("model.") if ".feed_forward.experts." in hf_name else hf_name
        known += ".bias" if known.endswith("expert_bias") else ""  # converters give it a last word
        name = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert name, hf_name
        wanted = next((k for part, k in (kinds or {}).items() if part in hf_name), kind) if stored.ndim > 1 else "F32"
        qtype = GGMLQuantizationType[wanted]
        data = _encode(stored.astype(np.float32), wanted)
        writer.add_tensor(name, data, raw_dtype=qtype)
        back = stored if wanted == "F32" else dequantize(data, qtype).reshape(stored.shape)
        expected |= _unstack(hf_name, _convert_back(hf_name, back, arch, config, value.shape))
    if "rope_factors" in config:
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(config["rope_factors"][which], np.float32))
    if "rope_freqs" in config:
        writer.add_tensor("rope_freqs.weight", np.array(config["rope_freqs"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


# K-quants: bytes of a block of 256, where its two scales lie, and values of them that make weights of a tenth or so
K_BLOCKS: dict[str, tuple[int, dict[int, float]]] = {
    "Q2_K": (84, {80: 4e-3, 82: 6e-3}),
    "Q3_K": (110, {108: 1e-3}),
    "Q4_K": (144, {0: 2e-4, 2: 15e-4}),
    "Q5_K": (176, {0: 1e-4, 2: 15e-4}),
    "Q6_K": (210, {208: 3e-5}),
}


def _encode(values: Array, kind: str) -> Array:
    """The blocks of a matrix; of K-quants, which the gguf package can't make, random ones of the same shape."""
    if kind == "F32":
        return values
    if kind not in K_BLOCKS:
        return np.asarray(quantize(values, GGMLQuantizationType[kind]))
    block_bytes, scales = K_BLOCKS[kind]
    rows, cols = values.shape
    blocks = np.random.default_rng(rows).integers(0, 256, (rows, cols // 256, block_bytes), np.uint8)
    for at, scale in scales.items():
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _write_metadata(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    kinds, kv_heads = config.get("layer_types") or [], config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads * (kind != "conv") for kind in kinds] if "conv" in kinds else kv_heads)
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_dense_layers" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.get("norm_eps") or config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "rope_factors" in config:
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(config["attn_factor"])
    writer.add_eos_token_id(config["eos_token_id"])
    if "tokens" in config:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(config["tokens"])
        writer.add_token_merges(config["merges"])


def _stack_experts(tensors: dict[str, Array]) -> dict[str, Array]:
    """`...experts.3.w1.weight` of all experts -> one `...experts.w1.weight`."""
    stacked: dict[str, dict[int, Array]] = {}
    out = {}
    for name, value in tensors.items():
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            number, _, rest = tail.partition(".")
            stacked.setdefault(f"{head}.experts.{rest}", {})[int(number)] = value
        else:
            out[name] = value
    return out | {name: np.stack([by[i] for i in sorted(by)]) for name, by in stacked.items()}


def _unstack(name: str, value: Array) -> dict[str, Array]:
    if ".experts." not in name:
        return {name: value}
    head, _, tail = name.partition(".experts.")
    return {f"{head}.experts.{index}.{tail}": item for index, item in enumerate(value)}


def _is_permuted(name: str, arch: str) -> bool:
    return arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name)


def _num_heads(name: str, config: dict[str, Any]) -> int:
    heads: int = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    return heads


def _convert(name: str, value: Array, arch: str, config: dict[str, Any]) -> Array:
    if _is_permuted(name, arch):
        heads = _num_heads(name, config)
        shape = (heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return value.reshape(shape).swapaxes(1, 2).reshape(value.shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return value + 1
    if "shared_expert_gate" in name:
        return value.squeeze(0)
    if ".conv.conv." in name:
        return value.squeeze(1)
    return value


def _convert_back(name: str, value: Array, arch: str, config: dict[str, Any], shape: tuple[int, ...]) -> Array:
    if _is_permuted(name, arch):
        heads = _num_heads(name, config)
        pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
        return pairs.swapaxes(1, 2).reshape(shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return value - 1
    return value.reshape(shape)
