"""A.X K1: DeepSeek V3 with a norm of what experts give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.deepseek import LATENTS
from bough.models.hf_names import CHOICE_BIAS, ENDS, EXPERTS, FEED_FORWARD, NORMS, SHARED_EXPERTS, in_layers
from bough.weights.mapping import Beyond, Mapping

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder


def read(config: Fields) -> ModelFacts:
    groups = {"n_group": config.count("n_group", default=8), "topk_group": config.count("topk_group", default=4)}
    experts = reading.grouped_sigmoid(config.put(**groups), scale=config.number("routed_scaling_factor", default=2.5))
    ffns = reading.dense_first(config, experts, default=1)
    return reading.decoder(config, reading.mla(config), ffns, norm=reading.rms_norm(config), block_norms=3)


def make(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.decoder import Decoder
    from bough.models.axk1_block import ExpertsNormBlock

    return Decoder(facts, build, ExpertsNormBlock)


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *in_layers({"post_mlp_layernorm": "after_mlp_norm"}),
    *LATENTS,
    *FEED_FORWARD,
    *EXPERTS,
    *CHOICE_BIAS,
    *SHARED_EXPERTS,
    Beyond("model.layers"),
)
