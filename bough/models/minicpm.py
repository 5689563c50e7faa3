"""MiniCPM 1, 2 and 4: Llama with multipliers of embeddings, of what blocks add, and of logits."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.core.errors import UnsupportedModel
from bough.models.llama import WEIGHTS, make
from bough.models.minicpm3 import multipliers

__all__ = ["WEIGHTS", "make", "read"]


def read(config: Fields) -> ModelFacts:
    if config.has("num_experts"):
        raise UnsupportedModel(what="MiniCPM with experts", why="this is not implemented")
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias)
    ffns = [reading.dense(config)] * len(ropes)
    tied = config.flag("tie_word_embeddings", default=True)
    norm = reading.rms_norm(config)
    scales = multipliers(config, embed=1.0, depth=1.0, base=1.0)
    return reading.decoder(config, attention, ffns, norm=norm, tie_embeddings=tied, **scales)
