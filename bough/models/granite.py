"""Granite 3: Llama with four multipliers: of embeddings, of what blocks add, of scores, and of logits."""

from __future__ import annotations

from typing import Any

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    ffn = reading.dense(config, bias=config.flag("mlp_bias"))
    attention = attention_of(config)
    return reading.decoder(
        config, attention, [ffn] * len(attention), norm=reading.rms_norm(config), **multipliers(config)
    )  # fmt: skip


def attention_of(config: Fields, *, rotated: bool = True) -> list[Gqa]:
    """`rotated`: whether positions are."""
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, reading.head_dim(config)) if rotated else (None,) * reading.num_layers(config)
    scale = config.number("attention_multiplier", default=1.0)
    return reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias, scale=scale)


def multipliers(config: Fields) -> dict[str, Any]:
    """As fields of `ModelFacts`."""
    return {
        "embed_scale": config.number("embedding_multiplier", default=1.0),
        "residual_scale": config.number("residual_multiplier", default=1.0),
        "logit_scale": 1.0 / config.positive("logits_scaling", default=1.0),
    }


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
