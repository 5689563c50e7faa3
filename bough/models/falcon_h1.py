"""Falcon-H1: Mamba 2 and attention in parallel in every block, with multipliers at every place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.state_reading import mamba2
from bough.core.errors import ConfigError
from bough.models.hf_names import ATTENTION, ENDS, JAMBA_BLOCK, mamba2 as mamba2_names
from bough.weights.mapping import Mapping

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder


def read(config: Fields) -> ModelFacts:
    norm = reading.rms_norm(config, default=1e-5)
    width, bias = reading.head_dim(config), config.flag("attention_bias")
    # Scores grow with keys, and with the inputs of both queries and keys.
    inputs = _of_inputs(config, "attention_in_multiplier", bias)
    scale = width**-0.5 * config.number("key_multiplier", default=1.0) * inputs**2
    ropes = reading.same_rope(config, width)
    attention = reading.gqa(config, width=width, ropes=ropes, qkv_bias=bias, out_bias=bias, scale=scale)
    in_bias = config.flag("mamba_proj_bias")
    inputs = _of_inputs(config, "ssm_in_multiplier", in_bias)
    z, x, b, c, dt = (inputs * each for each in (config.numbers("ssm_multipliers", 5) or (1.0,) * 5)[:5])
    state = mamba2(
        config,
        inner=config.count("mamba_d_ssm") if config.has("mamba_d_ssm") else None,
        norm_eps=norm.eps if config.flag("mamba_rms_norm") else None,
        norm_first=config.flag("mamba_norm_before_gate", default=True),
        in_bias=in_bias,
        out_bias=config.flag("projectors_bias"),
        scales=(z, x, b, c, dt),
    )
    gates = (config.numbers("mlp_multipliers", 2) or (1.0, 1.0))[0]
    ffn = reading.dense(config, bias=config.flag("mlp_bias"), gate_scale=gates)
    return reading.decoder(
        config,
        [(state, each) for each in attention],
        [ffn] * len(attention),
        norm=norm,
        embed_scale=config.number("embedding_multiplier", default=1.0),
        logit_scale=config.number("lm_head_multiplier", default=1.0),
    )


def _of_inputs(config: Fields, key: str, bias: bool) -> float:
    """A multiplier of what a projection reads, to be applied to what it gives."""
    scale = config.number(key, default=1.0)
    if bias and scale != 1.0:
        raise ConfigError(
            what=f"the model's config has {key} {scale} beside a bias of the projection that it is for",
            why="it is applied behind the projection, which no published checkpoint has with a bias",
            fix="choose a checkpoint without",
        )
    return scale


WEIGHTS = Mapping(*ENDS, *JAMBA_BLOCK, *ATTENTION, *mamba2_names("model.layers.*.mamba", "layers.*.state"))


def make(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.decoder import Decoder
    from bough.models.falcon_h1_block import FalconH1Block

    return Decoder(facts, build, FalconH1Block)
