"""Ministral 3 and Mistral Large 3, text: Mistral whose queries grow with their position beyond the trained length."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Temperature
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config)
    rope = Fields(config.any("rope_parameters", "rope_scaling") or {})
    growth = None
    if rope.has("llama_4_scaling_beta"):
        every = rope.count("original_max_position_embeddings")
        growth = Temperature(scale=rope.number("llama_4_scaling_beta"), every=every)
    attention = reading.gqa(
        config,
        width=width,
        windows=reading.windows(config, reading.every_layer),
        ropes=reading.same_rope(config, width),
        temperature=growth,
    )
    ffns = [reading.dense(config)] * len(attention)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config))


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
