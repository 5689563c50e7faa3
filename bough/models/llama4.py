"""Llama 4, text: most layers attend within chunks, every fourth to everything and without rotary positions; one expert
per token, weighed at its input."""

from __future__ import annotations

from dataclasses import replace

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, FeedForward, HeadNorms, ModelFacts, NormFacts, Scored, Temperature
from bough.models.hf_names import ATTENTION, ENDS, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Fuse, Mapping, Stacked


def read(config: Fields) -> ModelFacts:
    count = reading.num_layers(config)
    width = reading.head_dim(config, 128)
    every = config.count("no_rope_layer_interval", default=4)
    turned = config.flags("no_rope_layers", count) or [(layer + 1) % every != 0 for layer in range(count)]
    growth = None
    if config.flag("attn_temperature_tuning", default=True):
        growth = Temperature(
            scale=config.number("attn_scale", default=0.1), every=config.count("floor_scale", default=8192), shift=1
        )
    norm = reading.rms_norm(config, default=1e-5)
    heads = HeadNorms(norm=NormFacts(eps=norm.eps, weight=False), after_rope=True)
    bias = config.flag("attention_bias")
    chunk = config.count("attention_chunk_size", default=8192)
    ropes = reading.same_rope(config, width, theta=500_000.0, interleaved=True)
    attention = [
        replace(
            each,
            rope=each.rope if turned[layer] else None,
            chunk=chunk if turned[layer] else None,
            head_norms=heads if turned[layer] and config.flag("use_qk_norm", default=True) else None,
            temperature=None if turned[layer] else growth,
        )
        for layer, each in enumerate(reading.gqa(config, width=width, ropes=ropes, qkv_bias=bias, out_bias=bias))
    ]
    return reading.decoder(config, attention, _feed_forward(config, count), norm=norm)


def _feed_forward(config: Fields, count: int) -> list[FeedForward]:
    sparse, step = config.sizes("moe_layers"), config.count("interleave_moe_layer_step", default=1)
    dense = Dense(intermediate=config.count("intermediate_size_mlp"))
    experts = reading.moe(
        config,
        "num_local_experts",
        renormalise=False,
        scored=Scored(),
        weighs_input=True,
        shared_intermediate=config.count("intermediate_size"),
        shared_gated=False,
    )
    return [
        experts if (layer in sparse if sparse is not None else (layer + 1) % step == 0) else dense
        for layer in range(count)
    ]


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    Fuse(
        "layers.*.mlp.gate_up",
        gate="model.layers.*.feed_forward.gate_proj",
        up="model.layers.*.feed_forward.up_proj",
    ),
    *in_layers(
        {
            "feed_forward.down_proj": "mlp.down",
            "feed_forward.router": "mlp.router",
            "feed_forward.shared_expert.down_proj": "mlp.shared.down",
        }
    ),
    Fuse(
        "layers.*.mlp.shared.gate_up",
        gate="model.layers.*.feed_forward.shared_expert.gate_proj",
        up="model.layers.*.feed_forward.shared_expert.up_proj",
    ),
    Stacked(
        "model.layers.*.feed_forward.experts.gate_up_proj",
        "layers.*.mlp.experts",
        parts=("gate", "up"),
        inputs_first=True,
    ),
    Stacked(
        "model.layers.*.feed_forward.experts.down_proj", "layers.*.mlp.experts", parts=("down",), inputs_first=True
    ),
)
make = pre_norm
