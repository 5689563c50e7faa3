"""Qwen3: Llama's block with each head of queries and keys normed before it is rotated."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, NORMS
from bough.models.makers import pre_norm
from bough.models.qwen2 import windows_from
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 128)
    norm = reading.rms_norm(config)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        width=width,
        windows=windows_from(config),
        ropes=reading.same_rope(config, width),
        head_norms=HeadNorms(norm=norm),
        qkv_bias=bias,
        out_bias=bias,
    )
    return reading.decoder(config, attention, [reading.dense(config)] * len(attention), norm=norm)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD)
make = pre_norm
