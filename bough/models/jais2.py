"""Jais 2: Llama with layer norms, biases everywhere, and a feed-forward of squared ReLU."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.nemotron import WEIGHTS, make

__all__ = ["WEIGHTS", "make", "read"]


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config)
    bias = config.flag("attention_bias", default=True)
    ropes = reading.same_rope(config, width)
    ffn = reading.dense(config, default="relu2", gated=False, bias=config.flag("mlp_bias", default=True))
    attention = reading.gqa(config, width=width, ropes=ropes, qkv_bias=bias, out_bias=bias)
    return reading.decoder(config, attention, [ffn] * len(ropes), norm=reading.layer_norm(config, "layer_norm_eps"))
