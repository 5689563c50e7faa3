"""Laguna: a gate for each head, as many heads as the layer's kind has, windows with rotary positions of their own, and
experts chosen by a sigmoid and a bias beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, HeadNorms, ModelFacts, OutputGate, Scored
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, HEAD_NORMS, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Fuse, Mapping


def read(config: Fields) -> ModelFacts:
    norm = reading.rms_norm(config)
    cap = config.number("moe_router_logit_softcapping", default=0.0)
    experts = reading.moe(
        config,
        "num_experts",
        renormalise=True,
        scored=Scored(bias="flat", softcap=cap or None),
        scale=config.number("moe_routed_scaling_factor", default=1.0),
        shared_intermediate=config.count("shared_expert_intermediate_size"),
        shared_gated=False,
    )
    return reading.decoder(config, _attention(config), reading.dense_first(config, experts, default=1), norm=norm)


def _attention(config: Fields) -> list[Gqa]:
    reading.state_rope(config)
    width = reading.head_dim(config, 128)
    windows = reading.windows(config, reading.no_layer, default=512)
    bias = config.flag("attention_bias")
    per_head = config.any("gating") in (None, True, "per-head")
    ropes = reading.ropes_by_window(config, width, windows, theta=500_000.0, theta_local=10_000.0)
    same = reading.gqa(
        config,
        width=width,
        windows=windows,
        ropes=ropes,
        head_norms=HeadNorms(norm=reading.rms_norm(config)),
        gate=OutputGate(by="softplus", over="head" if per_head else "value"),
        qkv_bias=bias,
        out_bias=bias,
    )
    heads = config.counts("num_attention_heads_per_layer", len(same)) or [each.num_heads for each in same]
    return [replace(each, num_heads=count) for each, count in zip(same, heads, strict=True)]


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *in_layers({"self_attn.g_proj": "attn.gate.linear", "mlp.shared_expert.down_proj": "mlp.shared.down"}),
    *FEED_FORWARD,
    *EXPERTS,
    Fuse(
        "layers.*.mlp.shared.gate_up",
        gate="model.layers.*.mlp.shared_expert.gate_proj",
        up="model.layers.*.mlp.shared_expert.up_proj",
    ),
    Exact("model.layers.*.mlp.experts.e_score_correction_bias", "layers.*.mlp.choose.bias"),
)
make = pre_norm
