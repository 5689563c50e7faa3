"""InternLM 3: Llama, with biases where the config sets them."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.llama import WEIGHTS, make

__all__ = ["WEIGHTS", "make", "read"]


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config)
    bias = config.flag("bias")
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width),
        qkv_bias=config.flag("qkv_bias"),
        out_bias=bias,
    )
    ffn = reading.dense(config, bias=bias)
    return reading.decoder(config, attention, [ffn] * len(attention), norm=reading.rms_norm(config))
