"""Gemma 1: norms scale by 1 + weight, embeddings by the root of their width; a feed-forward gated by GELU."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 256)
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, width)
    attention = reading.gqa(config, width=width, ropes=ropes, qkv_bias=bias, out_bias=bias)
    # Old configs say "gelu" and mean its approximation, which the model was trained with.
    ffn = reading.dense(config, activation_key="hidden_activation", default="gelu_pytorch_tanh")
    return reading.decoder(
        config,
        attention,
        [ffn] * len(ropes),
        norm=reading.rms_norm(config, offset=1.0),
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        embed_scale=config.count("hidden_size") ** 0.5,
    )


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
