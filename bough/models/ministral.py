"""Ministral 3 and Mistral Large 3, text: Mistral whose queries grow with their position beyond the trained length."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Temperature
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    newer = config.architecture() != "MinistralForCausalLM"
    width = reading.head_dim(config, 128 if newer else None)
    attention = reading.gqa(
        config,
        width=width,
        windows=reading.windows(config, reading.every_layer, default=None if newer else 4096),
        ropes=reading.same_rope(config, width, stated=newer, interleaved=config.flag("rope_interleaved")),
        temperature=growth(config),
    )
    ffns = [reading.dense(config)] * len(attention)
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config, default=1e-5 if newer else 1e-6))


def growth(config: Fields) -> Temperature | None:
    """How queries grow with their position."""
    rope = config.inner("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    if not rope.has("llama_4_scaling_beta"):
        return None
    return Temperature(
        scale=rope.number("llama_4_scaling_beta"), every=rope.count("original_max_position_embeddings")
    )  # fmt: skip


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
