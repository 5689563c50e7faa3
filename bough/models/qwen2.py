"""Qwen2 and Qwen2.5: Llama's block with biases on queries, keys and values, and windows from some layer on if asked for."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(config, windows=windows_from(config), ropes=ropes, qkv_bias=True)
    ffns = [reading.dense(config)] * len(ropes)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config))


def windows_from(config: Fields) -> reading.Windows:
    """Windows from layer `max_window_layers` on."""
    first = config.size("max_window_layers", default=0)
    return reading.windows(config, lambda layer: layer >= first, opt_in=True)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
