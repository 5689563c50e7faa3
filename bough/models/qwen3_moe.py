"""Qwen3-MoE: Qwen3's attention, then a mixture of experts; some layers may be dense."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, HEAD_NORMS, NORMS
from bough.models.makers import pre_norm
from bough.models.qwen2_moe import sparse_layers
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    norm = reading.rms_norm(config)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        windows=reading.windows(config, reading.every_layer, opt_in=True, layer_types=False),
        ropes=reading.same_rope(config, reading.head_dim(config)),
        head_norms=HeadNorms(norm=norm),
        qkv_bias=bias,
        out_bias=bias,
    )
    experts = reading.moe(config, "num_experts", "num_local_experts", renormalise=config.flag("norm_topk_prob"))
    return reading.decoder(config, attention, sparse_layers(config, experts), norm=norm)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD, *EXPERTS)
make = pre_norm
