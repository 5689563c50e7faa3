"""ERNIE 4.5, dense: Llama with neighbouring values of a head rotated together."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    attention = attention_of(config)
    ffns = [reading.dense(config, bias=config.flag("use_bias"))] * len(attention)
    tied = config.flag("tie_word_embeddings", default=True)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config, default=1e-5), tie_embeddings=tied)


def attention_of(config: Fields, width: int = 128) -> list[Gqa]:
    """`width`: of a head where the config names none."""
    width = reading.head_dim(config, width)
    bias = config.flag("use_bias")
    ropes = reading.same_rope(config, width, theta=500_000.0, interleaved=True)
    return reading.gqa(config, width=width, ropes=ropes, qkv_bias=bias, out_bias=bias)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
