"""Persimmon: layer norms, also of each head, with biases everywhere; half of each head is rotated; squared ReLU."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Rename, Split


def read(config: Fields) -> ModelFacts:
    norm = reading.layer_norm(config, "layer_norm_eps")
    attention = reading.gqa(
        config.put(num_key_value_heads=None),
        ropes=reading.same_rope(config, reading.head_dim(config), share=0.5),
        head_norms=HeadNorms(norm=norm) if config.flag("qk_layernorm", default=True) else None,
        qkv_bias=True,
        out_bias=True,
    )
    ffn = reading.dense(config, default="relu2", gated=False, bias=True)
    return reading.decoder(config, attention, [ffn] * len(attention), norm=norm)


WEIGHTS = Mapping(
    Rename("model.embed_tokens", "embed.tokens"),
    Rename("model.final_layernorm", "norm"),
    Rename("lm_head", "head"),
    *NORMS,
    Split("model.layers.*.self_attn.query_key_value", "layers.*.attn.qkv", parts=("q", "k", "v"), by_head=True),
    *in_layers(
        {
            "self_attn.dense": "attn.out",
            "self_attn.q_layernorm": "attn.q_norm",
            "self_attn.k_layernorm": "attn.k_norm",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        }
    ),
)
make = pre_norm
