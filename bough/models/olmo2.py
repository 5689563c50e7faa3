"""OLMo 2: norms after each half of a block instead of before, and of all heads together."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, POST_NORMS
from bough.models.makers import post_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    ropes = reading.same_rope(config, reading.head_dim(config))
    return with_attention(config, (None,) * len(ropes), ropes)


def with_attention(config: Fields, windows: reading.Windows, ropes: reading.Ropes, *, eps: float = 1e-5) -> ModelFacts:
    norm = reading.rms_norm(config, default=eps)
    bias = config.flag("attention_bias")
    heads = HeadNorms(norm=norm, over="all heads")
    attention = reading.gqa(config, windows=windows, ropes=ropes, head_norms=heads, qkv_bias=bias, out_bias=bias)
    return reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=norm)


WEIGHTS = Mapping(*ENDS, *POST_NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD)
make = post_norm
