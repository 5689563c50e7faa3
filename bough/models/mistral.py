"""Mistral: Llama's block, whose attention sees a sliding window in every layer where the config sets one."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    ropes = reading.same_rope(config, reading.head_dim(config), interleaved=config.flag("rope_interleaved"))
    attention = reading.gqa(config, windows=reading.windows(config, reading.every_layer, default=4096), ropes=ropes)
    ffns = [reading.dense(config)] * len(ropes)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config))


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
