"""Tensor names of Mistral's own layout (consolidated.safetensors) -> those of the model's other checkpoint."""

from __future__ import annotations

import re
from typing import Final

_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")
_OUTSIDE: Final[dict[str, str]] = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_TOWERS: Final = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
_LAYERS: Final[dict[str, str]] = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "gate": "mlp.gate",
    "shared_experts.w1": "mlp.shared_experts.gate_proj",
    "shared_experts.w2": "mlp.shared_experts.down_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
}
_MIXTRAL: Final = re.compile(r"feed_forward\.(gate|experts\.\d+\.w[123])")
_EXPERT: Final = re.compile(r"experts\.(\d+)\.(w[123])")
_MATRICES: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def hf_name(name: str) -> str | None:
    """The tensor's name in the other checkpoint; None: no layer's of the text model. A name without translation is returned
    as it is, and so ends in the list of extra tensors."""
    if name.startswith(_TOWERS):
        return None
    match = _LAYER.fullmatch(name)
    if match is None:
        stem, _, last = name.rpartition(".")
        return f"{_OUTSIDE[stem]}.{last}" if stem in _OUTSIDE else name
    layer, stem, last = match.groups()
    if mixtral := _MIXTRAL.fullmatch(stem):
        target: str | None = f"block_sparse_moe.{mixtral[1]}"
    elif expert := _EXPERT.fullmatch(stem):
        target = f"mlp.experts.{expert[1]}.{_MATRICES[expert[2]]}"
    else:
        target = _LAYERS.get(stem)
    return name if target is None else f"model.layers.{layer}.{target}.{last}"
