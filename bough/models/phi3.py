"""Phi-3 and Phi-4: Llama's block, stored with queries, keys and values fused, gate and up fused, and rotary factors found by
search for long contexts."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ENDS, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Rename, Split


def read(config: Fields) -> ModelFacts:
    config = config.put(original_max_position_embeddings=config.whole("original_max_position_embeddings", default=4096))
    # The scaling's earlier names.
    ropes = reading.same_rope(config, reading.head_dim(config), kinds={"su": "longrope", "yarn": "longrope"})
    attention = reading.gqa(config, windows=reading.windows(config, reading.every_layer), ropes=ropes)
    ffns = [reading.dense(config)] * len(ropes)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config, default=1e-5))


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    Split("model.layers.*.self_attn.qkv_proj", "layers.*.attn.qkv", parts=("q", "k", "v")),
    Rename("model.layers.*.self_attn.o_proj", "layers.*.attn.out"),
    Split("model.layers.*.mlp.gate_up_proj", "layers.*.mlp.gate_up", parts=("gate", "up")),
    Rename("model.layers.*.mlp.down_proj", "layers.*.mlp.down"),
)
make = pre_norm
