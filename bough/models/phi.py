"""Phi 1, 1.5 and 2: both halves of a block read one layer norm, half of each head is rotated, biases everywhere."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, in_layers
from bough.models.makers import parallel
from bough.weights.mapping import Mapping, Rename


def read(config: Fields) -> ModelFacts:
    norm = reading.layer_norm(config, "layer_norm_eps")
    ropes = reading.same_rope(config, reading.head_dim(config), share=0.5)
    heads = HeadNorms(norm=norm) if config.flag("qk_layernorm") else None
    attention = reading.gqa(config, ropes=ropes, qkv_bias=True, out_bias=True, head_norms=heads)
    ffn = reading.dense(config, default="gelu_new", gated=False, bias=True)
    return reading.decoder(config, attention, [ffn] * len(ropes), norm=norm, head_bias=True, block_norms=1)


WEIGHTS = Mapping(
    *ENDS,
    *ATTENTION,
    Rename("model.final_layernorm", "norm"),
    *in_layers(
        {
            "input_layernorm": "attn_norm",
            "self_attn.dense": "attn.out",
            "self_attn.q_layernorm": "attn.q_norm",
            "self_attn.k_layernorm": "attn.k_norm",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        }
    ),
)
make = parallel
