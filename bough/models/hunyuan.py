"""Hunyuan 0.5B to 7B, dense: heads are normed after they are rotated."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, HeadNorms, ModelFacts
from bough.core.errors import UnsupportedModel
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    attention = attention_of(config)
    norm = reading.rms_norm(config, default=1e-5)
    return reading.decoder(config, attention, [reading.dense(config)] * len(attention), norm=norm)


def attention_of(config: Fields) -> list[Gqa]:
    if config.flag("use_cla"):
        raise UnsupportedModel(
            what="the model's use_cla can't be served",
            why="no class of transformers has layers that read keys and values of others (Hunyuan-Large) to compare with",
        )
    width = reading.head_dim(config)
    bias = config.flag("attention_bias")
    heads = HeadNorms(norm=reading.rms_norm(config, default=1e-5), after_rope=True)
    ropes = reading.same_rope(config, width, alpha=True)
    return reading.gqa(config, width=width, ropes=ropes, head_norms=heads, qkv_bias=bias, out_bias=bias)


HEADS = in_layers({"self_attn.query_layernorm": "attn.q_norm", "self_attn.key_layernorm": "attn.k_norm"})
WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *HEADS, *FEED_FORWARD)
make = pre_norm
