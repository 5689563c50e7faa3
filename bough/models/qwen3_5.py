"""Qwen3.5, dense: Qwen3-Next's layers with a feed-forward block, and projections that are stored one by one."""

from __future__ import annotations

from typing import Any

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.models.qwen3_next import DELTA, GATED_ATTENTION, mixers, read_norm
from bough.weights.mapping import Fuse, Mapping, Outside, Rule, Split

TURNS = {"sections": (11, 11, 10), "sections_take_turns": True}
"""How positions of several axes rotate a head, in models that also see."""


def read(config: Fields, **rope: Any) -> ModelFacts:
    """`rope`: as in `mixers`."""
    layers = mixers(config, **rope)
    return reading.decoder(config, layers, [reading.dense(config)] * len(layers), norm=read_norm(config))


MIXERS: tuple[Rule, ...] = (
    *GATED_ATTENTION,
    *DELTA,
    Split("model.layers.*.linear_attn.in_proj_qkv", "layers.*.attn.mix", parts=("q", "k", "v")),
    Fuse("layers.*.attn.mix", z="model.layers.*.linear_attn.in_proj_z"),
    Fuse("layers.*.attn.rates", b="model.layers.*.linear_attn.in_proj_b", a="model.layers.*.linear_attn.in_proj_a"),
)
WEIGHTS = Mapping(*ENDS, *NORMS, *MIXERS, *FEED_FORWARD, Outside("mtp"))
make = pre_norm
