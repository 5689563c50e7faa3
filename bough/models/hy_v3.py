"""Hunyuan 3: Qwen3's attention, a dense layer first, then experts chosen by a sigmoid and a bias beside shared ones."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, HEAD_NORMS, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Beyond, Exact, Fuse, Mapping


def read(config: Fields) -> ModelFacts:
    config = config.also(n_shared_experts="num_shared_experts", routed_scaling_factor="router_scaling_factor")
    width = reading.head_dim(config, 128)
    norm = reading.rms_norm(config, default=1e-5)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width, theta=11_158_840.0),
        head_norms=HeadNorms(norm=norm),
        qkv_bias=bias,
        out_bias=bias,
    )
    experts = reading.grouped_sigmoid(
        config, renormalise=True, scale=config.number("routed_scaling_factor", default=2.826)
    )
    return reading.decoder(config, attention, reading.dense_first(config, experts, default=1), norm=norm)


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *FEED_FORWARD,
    *EXPERTS[1:],
    *in_layers({"mlp.router.gate": "mlp.router", "mlp.shared_mlp.down_proj": "mlp.shared.down"}),
    Fuse(
        "layers.*.mlp.shared.gate_up",
        gate="model.layers.*.mlp.shared_mlp.gate_proj",
        up="model.layers.*.mlp.shared_mlp.up_proj",
    ),
    Exact("model.layers.*.mlp.expert_bias", "layers.*.mlp.choose.bias"),
    Beyond("model.layers"),
)
make = pre_norm
