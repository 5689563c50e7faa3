"""HyperCLOVA X SEED Think: Granite with norms after each half of a block as well; logits are multiplied, not divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.granite import multipliers
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS, in_layers
from bough.models.makers import pre_norm, sandwich
from bough.weights.mapping import Mapping

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder


def read(config: Fields) -> ModelFacts:
    bias, width = config.flag("attention_bias"), reading.head_dim(config)
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width),
        qkv_bias=bias,
        out_bias=bias,
        scale=config.number("attention_multiplier", default=width**-0.5),
    )
    scales = {**multipliers(config), "logit_scale": config.positive("logits_scaling", default=1.0)}
    return reading.decoder(
        config,
        attention,
        [reading.dense(config, bias=config.flag("mlp_bias"))] * len(attention),
        norm=reading.rms_norm(config),
        block_norms=4 if config.flag("use_post_norm", default=True) else 2,
        **scales,
    )


def make(facts: ModelFacts, build: Build) -> Decoder:
    return sandwich(facts, build) if facts.block_norms == 4 else pre_norm(facts, build)


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *in_layers({"post_norm1": "after_attn_norm", "post_norm2": "after_mlp_norm"}),
    *ATTENTION,
    *FEED_FORWARD,
)
