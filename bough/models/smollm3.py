"""SmolLM3: Llama's block; every fourth layer has no rotary positions."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    count, interval = reading.num_layers(config), config.count("no_rope_layer_interval", default=4)
    rotated = config.flags("no_rope_layers", count) or [(layer + 1) % interval != 0 for layer in range(count)]
    ropes = reading.same_rope(config, reading.head_dim(config), theta=2_000_000.0)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        windows=reading.windows(config, lambda layer: not rotated[layer], opt_in=True),
        ropes=tuple(rope if rotated[layer] else None for layer, rope in enumerate(ropes)),
        qkv_bias=bias,
        out_bias=bias,
    )
    ffn = reading.dense(config, bias=config.flag("mlp_bias"))
    tied = config.flag("tie_word_embeddings", default=True)
    return reading.decoder(config, attention, [ffn] * count, norm=reading.rms_norm(config), tie_embeddings=tied)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
