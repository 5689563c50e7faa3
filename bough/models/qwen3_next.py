"""Qwen3-Next: gated delta nets in three layers of four and attention with a gate in the fourth, each followed by experts
beside a shared expert with a gate of its own."""

from __future__ import annotations

from typing import Any

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, Mixer, ModelFacts, NormFacts, OutputGate
from bough.config.state_facts import GatedDelta
from bough.core.errors import ConfigError
from bough.models.hf_names import ENDS, EXPERTS, FEED_FORWARD, HEAD_NORMS, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.models.qwen2_moe import SHARED_EXPERT, sparse_layers
from bough.weights.mapping import Exact, Fuse, Mapping, Outside, Rename, Split

_KINDS = ("linear_attention", "full_attention")


def read(config: Fields) -> ModelFacts:
    experts = reading.moe(
        config,
        "num_experts",
        renormalise=config.flag("norm_topk_prob", default=True),
        shared_intermediate=config.count("shared_expert_intermediate_size"),
    )
    return reading.decoder(config, mixers(config), sparse_layers(config, experts), norm=read_norm(config))


def read_norm(config: Fields) -> NormFacts:
    return reading.rms_norm(config, offset=1.0)


def mixers(config: Fields, **rope: Any) -> list[Mixer]:
    """By `layer_types`; without them every `full_attention_interval`th layer has attention. `rope`: further options of
    `reading.same_rope`."""
    width = reading.head_dim(config, 256)
    if config.flag("attention_bias"):
        raise ConfigError(
            what="the model's config has attention_bias",
            why="queries with a bias hold one of their gates, which no published checkpoint has",
            fix="choose a checkpoint without",
        )
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width, **rope),
        head_norms=HeadNorms(norm=read_norm(config)),
        gate=OutputGate(),
    )
    every = config.count("full_attention_interval", default=4)
    kinds = reading.checked_layer_types(config, _KINDS) or [
        _KINDS[(layer + 1) % every == 0] for layer in range(len(attention))
    ]
    delta = gated_delta(config)
    return [each if kind == "full_attention" else delta for each, kind in zip(attention, kinds, strict=True)]


def gated_delta(config: Fields) -> GatedDelta:
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    if values % keys:
        raise ConfigError(
            what=f"the model's config has {values} value heads over {keys} key heads",
            why="each key head must serve the same number of value heads",
            fix="check linear_num_key_heads and linear_num_value_heads",
        )
    return GatedDelta(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        conv_width=config.count("linear_conv_kernel_dim", default=4),
        norm_eps=reading.rms_norm(config).eps,
    )


GATED_ATTENTION = (
    Split("model.layers.*.self_attn.q_proj", "layers.*.attn", parts=("qkv.q", "gate.linear"), by_head=True),
    Fuse("layers.*.attn.qkv", k="model.layers.*.self_attn.k_proj", v="model.layers.*.self_attn.v_proj"),
    Rename("model.layers.*.self_attn.o_proj", "layers.*.attn.out"),
    *HEAD_NORMS,
)
DELTA = (
    Split("model.layers.*.linear_attn.conv1d", "layers.*.attn.conv", parts=("q", "k", "v")),
    *in_layers({"linear_attn.norm": "attn.norm", "linear_attn.out_proj": "attn.out"}),
    Exact("model.layers.*.linear_attn.A_log", "layers.*.attn.a_log.weight"),
    Exact("model.layers.*.linear_attn.dt_bias", "layers.*.attn.dt_bias.weight"),
)
WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *GATED_ATTENTION,
    *DELTA,
    Split("model.layers.*.linear_attn.in_proj_qkvz", "layers.*.attn.mix", parts=("q", "k", "v", "z"), by_head=True),
    Split("model.layers.*.linear_attn.in_proj_ba", "layers.*.attn.rates", parts=("b", "a"), by_head=True),
    *FEED_FORWARD,
    *EXPERTS,
    *SHARED_EXPERT,
    Outside("mtp"),
)
make = pre_norm
