"""Llama 1 to 3, SmolLM 1 and 2, and the many models trained in their shape.

Pre-norm blocks, grouped-query attention with rotary positions, a SiLU-gated feed-forward.
"""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias)
    ffn = reading.dense(config, bias=config.flag("mlp_bias"))
    return reading.decoder(config, attention, [ffn] * len(ropes), norm=reading.rms_norm(config))


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
