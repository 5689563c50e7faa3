"""Gemma 4, text: windowed layers with narrow heads and global ones with wide heads of which a quarter is rotated, values
normed, embeddings of each layer's own, last layers that read the KV of earlier ones, or experts beside a feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, FeedForward, Gqa, HeadNorms, ModelFacts, Moe, NormFacts, Scored
from bough.config.rope_facts import rope_facts
from bough.core.errors import ConfigError
from bough.models.gemma2 import softcap
from bough.models.gemma3n import KINDS, LAYER_INPUTS, layer_inputs
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, SANDWICH_NORMS, in_layers
from bough.weights.mapping import Exact, Mapping, Stacked

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder

_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def read(config: Fields) -> ModelFacts:
    if not config.has("rope_parameters"):
        config = config.put(rope_parameters=_ROPES)
    norm = reading.rms_norm(config)
    count = reading.num_layers(config)
    kinds = reading.checked_layer_types(config, KINDS) or [KINDS[(layer + 1) % 6 != 0] for layer in range(count)]
    kinds[-1] = "full_attention"
    kv_from = reading.shared_kv(config, kinds, default=0)
    attention = [_attention(config, layer, kind, norm) for layer, kind in enumerate(kinds)]
    has_experts = config.flag("enable_moe_block")
    return reading.decoder(
        config,
        attention,
        [_feed_forward(config, source is not None, has_experts=has_experts) for source in kv_from],
        norm=norm,
        kv_from=kv_from,
        block_norms=8 if has_experts else 4,
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        embed_scale=config.count("hidden_size") ** 0.5,
        logit_softcap=softcap(config, "final_logit_softcapping", None),
        per_layer=layer_inputs(config) if config.size("hidden_size_per_layer_input", default=256) else None,
    )


def _attention(config: Fields, layer: int, kind: str, norm: NormFacts) -> Gqa:
    """A layer's. What global layers have of their own is said for each layer, or for all of them."""
    slides = kind == "sliding_attention"
    keys_are_values = config.flag("attention_k_eq_v") and not slides
    width, kv_heads = reading.head_dim(config, 256), config.count("num_key_value_heads", default=4)
    if config.has("per_layer_config"):
        own = config.inner("per_layer_config").inner(str(layer))
        width, kv_heads = own.count("head_dim", default=width), own.count("num_key_value_heads", default=kv_heads)
    elif not slides:
        width = config.count("global_head_dim", default=512)
        if keys_are_values:
            kv_heads = config.count("num_global_key_value_heads", default=kv_heads)
    heads = config.count("num_attention_heads", default=8)
    if heads % kv_heads:
        raise ConfigError(
            what=f"layer {layer} of the model has {heads} attention heads over {kv_heads} key-value heads",
            why="each key-value head must serve the same number of heads",
            fix="check num_attention_heads, num_key_value_heads and num_global_key_value_heads",
        )
    both_ways = config.any("use_bidirectional_attention") == "all"
    window = config.count("sliding_window", default=512)
    bias = config.flag("attention_bias")
    return Gqa(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        scale=1.0,
        window=(window // 2 + 1 if both_ways else window) if slides else None,
        rope=rope_facts(config, width, default_theta=10_000.0 if slides else 1_000_000.0, layer_type=kind),
        causal=not both_ways,
        both_ways=slides,
        head_norms=HeadNorms(norm=norm),
        value_norm=NormFacts(eps=norm.eps, weight=False),
        values_are_keys=keys_are_values,
        qkv_bias=bias,
        out_bias=bias,
    )


def _feed_forward(config: Fields, shares_kv: bool, *, has_experts: bool) -> FeedForward:
    dense = reading.dense(config, activation_key="hidden_activation", default="gelu_pytorch_tanh")
    if shares_kv and config.flag("use_double_wide_mlp"):
        dense = replace(dense, intermediate=2 * dense.intermediate)
    if not has_experts:
        return dense
    return Moe(
        num_experts=config.count("num_experts"),
        experts_per_token=config.count("top_k_experts"),
        intermediate=config.count("moe_intermediate_size"),
        renormalise=True,
        activation=dense.activation,
        shared_intermediate=dense.intermediate,
        shared_gated=False,
        scored=Scored(by="softmax", logit_scale=config.count("hidden_size") ** -0.5, expert_scales=True),
    )


def beside(experts: Moe) -> Dense:
    """The feed-forward block that every token passes."""
    return Dense(intermediate=experts.shared_intermediate, activation=experts.activation)


def make(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.decoder import Decoder
    from bough.models.gemma4_block import Gemma4Block

    return Decoder(facts, build, Gemma4Block)


WEIGHTS = Mapping(
    *ENDS,
    *SANDWICH_NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *FEED_FORWARD,
    *LAYER_INPUTS,
    *in_layers(
        {
            "post_feedforward_layernorm_1": "experts.beside_norm",
            "post_feedforward_layernorm_2": "experts.after_norm",
            "pre_feedforward_layernorm_2": "experts.norm",
            "router.proj": "experts.mixture.router",
        }
    ),
    Exact("model.layers.*.layer_scalar", "layers.*.scale.weight"),
    Exact("model.layers.*.router.scale", "layers.*.experts.router_norm.weight"),
    Exact("model.layers.*.router.per_expert_scale", "layers.*.experts.mixture.choose.scales"),
    Stacked("model.layers.*.experts.gate_up_proj", "layers.*.experts.mixture.experts", parts=("gate", "up")),
    Stacked("model.layers.*.experts.down_proj", "layers.*.experts.mixture.experts", parts=("down",)),
)
