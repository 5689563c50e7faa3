"""DeepSeek MoE 16B: Llama's attention, a dense layer first, then experts chosen by a softmax beside shared ones."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, NORMS, SHARED_EXPERTS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias)
    norm = reading.rms_norm(config)
    if not config.has("n_routed_experts"):
        return reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=norm)
    experts = reading.moe(
        config,
        "n_routed_experts",
        renormalise=config.flag("norm_topk_prob"),
        shared_intermediate=config.size("n_shared_experts", default=0) * config.count("moe_intermediate_size"),
        shared_gated=False,
    )
    every = config.count("moe_layer_freq", default=1)
    sparse = [each and layer % every == 0 for layer, each in enumerate(reading.sparse_layers(config))]
    ffns = [experts if each else reading.dense(config) for each in sparse]
    return reading.decoder(config, attention, ffns, norm=norm)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD, *EXPERTS, *SHARED_EXPERTS)
make = pre_norm
