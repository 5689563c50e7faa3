"""Command R7B and Command A: Command-R's block; three windowed layers with rotary positions to one that sees all, without
them."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.cohere import WEIGHTS, make, with_attention

__all__ = ["WEIGHTS", "make", "read"]


def read(config: Fields) -> ModelFacts:
    every = config.count("sliding_window_pattern", default=4)
    windows = reading.windows(config, lambda layer: (layer + 1) % every != 0, default=4096)
    ropes = reading.same_rope(config, reading.head_dim(config), interleaved=True)
    ropes = reading.only_in_windows(ropes, windows)
    bias = config.flag("attention_bias")
    return with_attention(config, reading.gqa(config, windows=windows, ropes=ropes, qkv_bias=bias, out_bias=bias))
