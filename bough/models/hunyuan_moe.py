"""Hunyuan A13B: Hunyuan's attention, experts, and beside them a feed-forward that every token passes."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Moe
from bough.models.hf_names import ATTENTION, ENDS, NORMS, in_layers
from bough.models.hunyuan import HEADS, attention_of
from bough.models.makers import pre_norm
from bough.weights.mapping import Fuse, Mapping


def read(config: Fields) -> ModelFacts:
    attention = attention_of(config)
    ffns = [_experts(config, layer) for layer in range(len(attention))]
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config, default=1e-5))


def _experts(config: Fields, layer: int) -> Moe:
    def of(key: str) -> int:
        by_layer = config.counts(key, layer + 1) if isinstance(config.any(key), list) else None
        return by_layer[layer] if by_layer else config.count(key)

    return Moe(
        num_experts=of("num_experts"),
        experts_per_token=of("moe_topk"),
        intermediate=of("moe_intermediate_size") if config.has("moe_intermediate_size") else of("intermediate_size"),
        renormalise=True,
        shared_intermediate=config.count("intermediate_size")
        * (of("num_shared_expert") if config.has("num_shared_expert") else 1),
        shared_gated=False,
    )


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *HEADS,
    *in_layers(
        {
            "mlp.gate.wg": "mlp.router",
            "mlp.experts.*.gate_proj": "mlp.experts.*.gate",
            "mlp.experts.*.up_proj": "mlp.experts.*.up",
            "mlp.experts.*.down_proj": "mlp.experts.*.down",
            "mlp.shared_mlp.down_proj": "mlp.shared.down",
        }
    ),
    Fuse(
        "layers.*.mlp.shared.gate_up",
        gate="model.layers.*.mlp.shared_mlp.gate_proj",
        up="model.layers.*.mlp.shared_mlp.up_proj",
    ),
)
make = pre_norm
