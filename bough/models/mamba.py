"""Mamba and Falcon Mamba: nothing but layers that keep a state."""

from __future__ import annotations

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.state_reading import mamba, pure
from bough.models.hf_names import BACKBONE, mamba as mamba_names
from bough.models.makers import one_part
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    state = mamba(
        config,
        inner=config.count("intermediate_size") if config.has("intermediate_size") else None,
        bias=config.flag("use_bias"),
        # Falcon's has norms without weights inside.
        norm_eps=config.number("mixer_rms_eps") if config.has("mixer_rms_eps") else None,
        norm_weights=False,
    )
    return pure(config, state, tie_embeddings=config.flag("tie_word_embeddings", default=True))


WEIGHTS = Mapping(*BACKBONE, *mamba_names("backbone.layers.*.mixer", "layers.*.part"))
make = one_part
