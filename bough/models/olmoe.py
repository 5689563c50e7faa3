"""OLMoE: experts in every layer; norms of all heads together; values clamped if asked for."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, HEAD_NORMS, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    norm = reading.rms_norm(config, default=1e-5)
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(
        config,
        ropes=ropes,
        qkv_bias=bias,
        out_bias=bias,
        clip=config.positive("clip_qkv", default=0.0) or None,
        head_norms=HeadNorms(norm=norm, over="all heads"),
    )
    experts = reading.moe(config, "num_experts", renormalise=config.flag("norm_topk_prob"))
    return reading.decoder(config, attention, [experts] * len(ropes), norm=norm)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *EXPERTS)
make = pre_norm
