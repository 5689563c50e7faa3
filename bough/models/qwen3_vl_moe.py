"""Qwen3-VL-MoE: Qwen3-VL with a mixture of experts in its language model."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import qwen3_moe
from bough.models.makers import pre_norm
from bough.models.qwen2_moe import sparse_layers
from bough.models.qwen2_vl import PREFIXES
from bough.models.qwen3_vl import TOWER, make_tower, read_attention, seeing
from bough.models.seeing import seeing_weights, with_tower
from bough.weights.mapping import Mapping, Stacked


def read(config: Fields) -> ModelFacts:
    experts = reading.moe(config, "num_experts", "num_local_experts", renormalise=True)
    facts = reading.decoder(
        config, read_attention(config), sparse_layers(config, experts), norm=reading.rms_norm(config)
    )
    return seeing(facts, config)


_STACKED = (
    Stacked(
        "model.layers.*.mlp.experts.gate_up_proj", "layers.*.mlp.experts", ("gate", "up"),
        inputs_first=True, either_first=True,
    ),
    Stacked(
        "model.layers.*.mlp.experts.down_proj", "layers.*.mlp.experts", ("down",),
        inputs_first=True, either_first=True,
    ),
)  # fmt: skip
TEXT = Mapping(*qwen3_moe.WEIGHTS.rules, *_STACKED)
WEIGHTS = seeing_weights(TEXT, TOWER, PREFIXES)
make = with_tower(pre_norm, make_tower)
