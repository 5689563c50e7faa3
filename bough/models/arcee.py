"""Arcee (AFM): Llama with a feed-forward of squared ReLU, without gate."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, NORMS, UNGATED
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias)
    ffn = reading.dense(config, default="relu2", gated=False, bias=config.flag("mlp_bias"))
    return reading.decoder(config, attention, [ffn] * len(ropes), norm=reading.rms_norm(config, default=1e-5))


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *UNGATED)
make = pre_norm
