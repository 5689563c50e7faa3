"""InternLM 2 and 2.5: Llama, stored with queries, keys and values together for each key-value head."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Fuse, Mapping, Rename, Split


def read(config: Fields) -> ModelFacts:
    bias = config.flag("bias")
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias)
    return reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=reading.rms_norm(config))


WEIGHTS = Mapping(
    Rename("model.tok_embeddings", "embed.tokens"),
    Rename("model.norm", "norm"),
    Rename("output", "head"),
    Split("model.layers.*.attention.wqkv", "layers.*.attn.qkv", parts=("q", "k", "v"), by_head=True),
    Fuse("layers.*.mlp.gate_up", gate="model.layers.*.feed_forward.w1", up="model.layers.*.feed_forward.w3"),
    *in_layers(
        {
            "attention_norm": "attn_norm",
            "attention.wo": "attn.out",
            "ffn_norm": "mlp_norm",
            "feed_forward.w2": "mlp.down",
        }
    ),
)
make = pre_norm
