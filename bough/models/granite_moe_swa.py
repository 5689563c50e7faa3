"""Granite with experts, windows in three layers of four, and a sink beside every head's scores."""

from __future__ import annotations

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import granite_moe
from bough.models.granite_swa import SINKS, attention_of
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Stacked


def read(config: Fields) -> ModelFacts:
    return granite_moe.with_experts(config, attention_of(config))


WEIGHTS = Mapping(
    *granite_moe.WEIGHTS.rules,
    *SINKS,
    *in_layers({"block_sparse_moe.router": "mlp.router"}),
    Stacked("model.layers.*.block_sparse_moe.experts.gate_up_proj", "layers.*.mlp.experts", parts=("gate", "up")),
    Stacked("model.layers.*.block_sparse_moe.experts.down_proj", "layers.*.mlp.experts", parts=("down",)),
)
make = pre_norm
