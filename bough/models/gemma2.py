"""Gemma 2: norms before and after each half of a block, windows in every other layer, soft caps on scores and logits.

Norms scale by 1 + weight, and embeddings by the root of their width.
"""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, SANDWICH_NORMS
from bough.models.makers import sandwich
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 256)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        width=width,
        windows=reading.windows(config, lambda layer: layer % 2 == 0, default=4096),
        ropes=reading.same_rope(config, width),
        scale=config.positive("query_pre_attn_scalar", default=256) ** -0.5,
        softcap=softcap(config, "attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    return reading.decoder(
        config,
        attention,
        [reading.dense(config, activation_key="hidden_activation", default="gelu_pytorch_tanh")] * len(attention),
        norm=reading.rms_norm(config, offset=1.0),
        block_norms=4,
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        embed_scale=config.count("hidden_size") ** 0.5,
        logit_softcap=softcap(config, "final_logit_softcapping", 30.0),
    )


def softcap(config: Fields, key: str, default: float | None) -> float | None:
    """A config that names the cap as null or 0 has none."""
    if key in config.raw and (config.raw[key] is None or config.raw[key] == 0):
        return None
    return config.positive(key, default=default or 0.0) or None


WEIGHTS = Mapping(*ENDS, *SANDWICH_NORMS, *ATTENTION, *FEED_FORWARD)
make = sandwich
