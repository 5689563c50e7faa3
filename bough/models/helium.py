"""Helium: Llama with neighbouring values of a head rotated together."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 128)
    ropes = reading.same_rope(config, width, theta=100_000.0, interleaved=True)
    attention = reading.gqa(config, width=width, ropes=ropes, qkv_bias=config.flag("attention_bias"))
    ffns = [reading.dense(config, bias=config.flag("mlp_bias"))] * len(ropes)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config, default=1e-8))


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
