"""Qwen3.5 with experts, beside a shared expert with a gate of its own."""

from __future__ import annotations

from typing import Any

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ENDS, EXPERTS, NORMS
from bough.models.makers import pre_norm
from bough.models.qwen2_moe import SHARED_EXPERT
from bough.models.qwen3_5 import MIXERS
from bough.models.qwen3_next import mixers, read_norm
from bough.weights.mapping import Mapping, Outside, Stacked


def read(config: Fields, **rope: Any) -> ModelFacts:
    """`rope`: as in `mixers`."""
    layers = mixers(config, **rope)
    experts = reading.moe(
        config,
        "num_experts",
        renormalise=True,
        shared_intermediate=config.count("shared_expert_intermediate_size"),
    )
    return reading.decoder(config, layers, [experts] * len(layers), norm=read_norm(config))


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *MIXERS,
    *EXPERTS,
    Stacked("model.layers.*.mlp.experts.gate_up_proj", "layers.*.mlp.experts", ("gate", "up")),
    Stacked("model.layers.*.mlp.experts.down_proj", "layers.*.mlp.experts", ("down",)),
    *SHARED_EXPERT,
    Outside("mtp"),
)
make = pre_norm
