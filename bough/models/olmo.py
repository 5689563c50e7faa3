"""OLMo 1: norms without weights, and values of queries, keys and values clamped if asked for."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, NormFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    bias = config.flag("attention_bias")
    clip = config.positive("clip_qkv", default=0.0) or None
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias, clip=clip)
    norm = NormFacts(eps=1e-5, kind="layer", weight=False)
    return reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=norm)


WEIGHTS = Mapping(*ENDS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
