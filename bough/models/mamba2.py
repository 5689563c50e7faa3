"""Mamba 2: nothing but layers that keep a state (Codestral Mamba)."""

from __future__ import annotations

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.state_reading import mamba2, pure
from bough.models.hf_names import BACKBONE, mamba2 as mamba2_names
from bough.models.makers import one_part
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    bias = config.flag("use_bias")
    eps = config.number("layer_norm_epsilon", default=1e-5)
    return pure(config, mamba2(config, norm_eps=eps, in_bias=bias, out_bias=bias))


WEIGHTS = Mapping(*BACKBONE, *mamba2_names("backbone.layers.*.mixer", "layers.*.part"))
make = one_part
