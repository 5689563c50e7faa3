"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 128)
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width),
        qkv_bias=config.flag("attention_bias", default=True),
        out_bias=config.flag("attention_out_bias"),
    )
    ffns = [reading.dense(config, bias=config.flag("mlp_bias"))] * len(attention)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config))


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
