"""Qwen2-MoE: Qwen2's attention, then a mixture of experts beside a shared expert with a gate of its own; some layers may be
dense."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import FeedForward, ModelFacts, Moe
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Fuse, Mapping, Rename


def read(config: Fields) -> ModelFacts:
    ropes = reading.same_rope(config, reading.head_dim(config))
    attention = reading.gqa(
        config,
        windows=reading.windows(config, lambda layer: layer % 2 == 0, opt_in=True),
        ropes=ropes,
        qkv_bias=config.flag("qkv_bias", default=True),
    )
    experts = reading.moe(
        config,
        "num_experts",
        renormalise=config.flag("norm_topk_prob"),
        shared_intermediate=config.count("shared_expert_intermediate_size"),
    )
    return reading.decoder(config, attention, sparse_layers(config, experts), norm=reading.rms_norm(config))


def sparse_layers(config: Fields, experts: Moe) -> list[FeedForward]:
    """Experts in every `decoder_sparse_step`th layer but those of `mlp_only_layers`, which are dense."""
    dense, step = config.sizes("mlp_only_layers") or [], config.count("decoder_sparse_step", default=1)
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(reading.num_layers(config))]
    return [experts if each else reading.dense(config) for each in sparse]


SHARED_EXPERT = (
    Rename("model.layers.*.mlp.shared_expert_gate", "layers.*.mlp.shared.gate"),
    Fuse(
        "layers.*.mlp.shared.gate_up",
        gate="model.layers.*.mlp.shared_expert.gate_proj",
        up="model.layers.*.mlp.shared_expert.up_proj",
    ),
    Rename("model.layers.*.mlp.shared_expert.down_proj", "layers.*.mlp.shared.down"),
)
WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *FEED_FORWARD,
    *EXPERTS,
    *SHARED_EXPERT,
)
make = pre_norm
