"""Granite with windows in three layers of four, a sink beside every head's scores, and rotary bases of each layer's own."""

from __future__ import annotations

from dataclasses import replace

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, ModelFacts
from bough.core.errors import ConfigError
from bough.models import granite
from bough.models.granite import multipliers
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Mapping


def read(config: Fields) -> ModelFacts:
    ffn = reading.dense(config, bias=config.flag("mlp_bias"))
    attention = attention_of(config)
    return reading.decoder(
        config, attention, [ffn] * len(attention), norm=reading.rms_norm(config, default=1e-5), **multipliers(config)
    )  # fmt: skip


def attention_of(config: Fields) -> list[Gqa]:
    """A layer's base is that of `layer_rope_theta`, if there are any; 0: positions are not rotated."""
    windows = reading.windows(config, lambda layer: layer % 4 != 0, default=128)
    thetas = config.numbers("layer_rope_theta", len(windows)) or ()
    if any(theta < 0 for theta in thetas):
        raise ConfigError(what="layer_rope_theta has negative numbers", why="they are bases", fix="check config.json")
    made = []
    for layer, (each, window) in enumerate(zip(granite.attention_of(config), windows, strict=True)):
        rope = each.rope
        if thetas and rope is not None:
            rope = replace(rope, theta=thetas[layer]) if thetas[layer] else None
        made.append(replace(each, window=window, rope=rope, sinks=True))
    return made


SINKS = (Exact("model.layers.*.self_attn.sinks", "layers.*.attn.sinks.weight"),)
WEIGHTS = Mapping(*granite.WEIGHTS.rules, *SINKS)
make = pre_norm
