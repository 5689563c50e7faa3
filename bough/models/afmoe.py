"""AFMoE (Trinity): norms before and after each half of a block, a gate on what heads have read, windows with rotary
positions in three layers of four and neither in the fourth, experts chosen by a sigmoid and a bias."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts, OutputGate, Scored
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, HEAD_NORMS, SHARED_EXPERTS, in_layers
from bough.models.makers import sandwich
from bough.weights.mapping import Exact, Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 128)
    norm = reading.rms_norm(config, default=1e-5)
    every = config.count("global_attn_every_n_layers", default=4)
    windows = reading.windows(config, lambda layer: (layer + 1) % every != 0, default=1024)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        width=width,
        windows=windows,
        ropes=reading.only_in_windows(reading.same_rope(config, width), windows),
        head_norms=HeadNorms(norm=norm),
        gate=OutputGate(),
        qkv_bias=bias,
        out_bias=bias,
    )
    experts = reading.moe(
        config,
        "num_experts",
        renormalise=True,
        scored=Scored(bias="flat"),
        scale=config.number("route_scale", default=1.0),
        shared_intermediate=config.size("num_shared_experts", default=1) * config.count("moe_intermediate_size"),
        shared_gated=False,
    )
    first = config.size("num_dense_layers", default=1)
    return reading.decoder(
        config,
        attention,
        [reading.dense(config) if layer < first else experts for layer in range(len(attention))],
        norm=norm,
        block_norms=4,
        embed_scale=config.count("hidden_size") ** 0.5 if config.flag("mup_enabled") else None,
    )


_NORMS = in_layers(
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "after_attn_norm",
        "pre_mlp_layernorm": "mlp_norm",
        "post_mlp_layernorm": "after_mlp_norm",
    }
)
WEIGHTS = Mapping(
    *ENDS,
    *_NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *in_layers({"self_attn.gate_proj": "attn.gate.linear", "mlp.router.gate": "mlp.router"}),
    *FEED_FORWARD,
    *EXPERTS[1:],
    *SHARED_EXPERTS,
    Exact("model.layers.*.mlp.expert_bias", "layers.*.mlp.choose.bias"),
)
make = sandwich
