"""Granite 4: Mamba 2 in most layers and attention in a few (or in all), with Granite's multipliers, each followed by experts
beside one that sees every token, or by that one alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, FeedForward, Mixer, ModelFacts
from bough.config.state_reading import KINDS, mamba2
from bough.models.granite import attention_of, multipliers
from bough.models.granite_moe import WEIGHTS as GRANITE_MOE
from bough.models.hf_names import mamba2 as mamba2_names
from bough.weights.mapping import Mapping

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder


def read(config: Fields) -> ModelFacts:
    norm = reading.rms_norm(config)
    bias = config.flag("mamba_proj_bias")
    state = mamba2(config, norm_eps=norm.eps, in_bias=bias, out_bias=bias)
    attention = attention_of(config, rotated=config.word("position_embedding_type", "nope", "rope") == "rope")
    kinds = reading.checked_layer_types(config, tuple(KINDS)) or ["mamba"] * len(attention)
    mixers: list[Mixer] = [
        each if KINDS[kind] == "attention" else state for each, kind in zip(attention, kinds, strict=True)
    ]
    shared = config.count("shared_intermediate_size", default=1024)
    ffn: FeedForward = Dense(intermediate=shared, activation=reading.activation(config))
    if config.size("num_local_experts", default=8):
        ffn = reading.moe(
            config, "num_local_experts", renormalise=True, shared_intermediate=shared, shared_gated=False
        )  # fmt: skip
    return reading.decoder(config, mixers, [ffn] * len(mixers), norm=norm, **multipliers(config))


WEIGHTS = Mapping(*GRANITE_MOE.rules, *mamba2_names("model.layers.*.mamba", "layers.*.attn"))


def make(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.decoder import Decoder
    from bough.models.granite_moe_hybrid_block import GraniteHybridBlock

    return Decoder(facts, build, GraniteHybridBlock)
