"""Tensor names of GGUF files -> those of the model's safetensors checkpoint."""

from __future__ import annotations

import re
from typing import Final

_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")

_OUTSIDE: Final[dict[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
_LAYERS: Final[dict[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.#.gate_proj",
    "ffn_up_exps": "mlp.experts.#.up_proj",
    "ffn_down_exps": "mlp.experts.#.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LFM2: Final = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.#.w1",
    "ffn_up_exps": "feed_forward.experts.#.w3",
    "ffn_down_exps": "feed_forward.experts.#.w2",
    "exp_probs_b": "feed_forward.expert_bias",
}
_OF_ARCHITECTURE: Final[dict[str, dict[str, str]]] = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "Phi3ForCausalLM": {"ffn_up": "mlp.gate_up_proj"},
    "MixtralForCausalLM": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.#.w1",
        "ffn_up_exps": "block_sparse_moe.experts.#.w3",
        "ffn_down_exps": "block_sparse_moe.experts.#.w2",
    },
}


IN_CONFIG: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that were read with the config already."""


def hf_name(name: str, architecture: str) -> str:
    """The tensor's name in a safetensors checkpoint; `#` stands for the number of an expert where they are stacked.

    A name without translation is returned as it is, and so ends in the list of extra tensors.
    """
    if match := _LAYER.fullmatch(name):
        layer, stem, last = match.groups()
        target = _OF_ARCHITECTURE.get(architecture, {}).get(stem) or _LAYERS.get(stem)
        if target and target.endswith("_bias"):  # of experts: it stands alone, without a last word
            return f"model.layers.{layer}.{target}"
        return f"model.layers.{layer}.{target}.{last}" if target else name
    stem, _, last = name.rpartition(".")
    return f"{_OUTSIDE[stem]}.{last}" if stem in _OUTSIDE else name


def is_interleaved(arch: str, name: str) -> bool:
    """Whether llama.cpp's converter put the tensor's rows in the order of neighbouring pairs (q and k of Llama)."""
    return arch in ("llama", "smollm3") and (".attn_q." in name or ".attn_k." in name)


def norms_include_one(arch: str, name: str) -> bool:
    """Whether the 1 of Gemma's (1 + weight) norms is already in the stored weight."""
    return arch.startswith("gemma") and name.endswith("norm.weight")
