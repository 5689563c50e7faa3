"""Nemotron 3 and 4, Minitron: layer norms by 1 + weight, half of each head rotated, a feed-forward of squared ReLU."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, NORMS, UNGATED
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config)
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, width, share=0.5)
    attention = reading.gqa(config, width=width, ropes=ropes, qkv_bias=bias, out_bias=bias)
    ffn = reading.dense(config, default="relu2", gated=False, bias=config.flag("mlp_bias"))
    norm = reading.layer_norm(config, "norm_eps", offset=1.0)
    return reading.decoder(config, attention, [ffn] * len(ropes), norm=norm)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *UNGATED)
make = pre_norm
