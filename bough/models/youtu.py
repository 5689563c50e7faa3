"""Youtu-LLM: attention over latents in dense layers."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.deepseek import LATENTS
from bough.models.hf_names import ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    attention = reading.mla(config)
    tied = config.flag("tie_word_embeddings", default=True)
    ffns = [reading.dense(config)] * len(attention)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config), tie_embeddings=tied)


WEIGHTS = Mapping(*ENDS, *NORMS, *LATENTS, *FEED_FORWARD)
make = pre_norm
