"""Kimi-Linear: gated delta nets whose states decay channel by channel in three layers of four, and attention over latents
without positions in the fourth. The first layer is dense, the others have experts as DeepSeek V3."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Mixer, ModelFacts
from bough.config.state_facts import GatedDelta
from bough.core.errors import ConfigError, UnsupportedModel
from bough.models.deepseek import BESIDE_QUERIES
from bough.models.hf_names import BLOCK_SPARSE_EXPERTS, ENDS, FEED_FORWARD, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Fuse, Mapping, Rename

_KINDS = ("linear_attention", "full_attention")
_CALLED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


def read(config: Fields) -> ModelFacts:
    config = config.also(**_CALLED)
    if config.has("mla_use_nope") and not config.flag("mla_use_nope"):
        raise UnsupportedModel(what="a Kimi-Linear model with rotated latents", why="no released checkpoint is one")
    norm = reading.rms_norm(config, default=1e-5)
    latents = reading.mla(config.put(q_lora_rank=config.any("q_lora_rank")), rotated=False, eps=norm.eps)
    delta = _delta(config, norm.eps)
    mixers: list[Mixer] = [
        each if kind == "full_attention" else delta for each, kind in zip(latents, _kinds(config), strict=True)
    ]
    scale = config.number("routed_scaling_factor", default=2.446)
    ffns = reading.dense_first(config, reading.grouped_sigmoid(config, scale=scale), default=1)
    return reading.decoder(config, mixers, ffns, norm=norm)


def _delta(config: Fields, eps: float) -> GatedDelta:
    """Its sizes stand beside the others or, as published, in an object of their own."""
    own = config.inner("linear_attn_config")
    heads = own.count("num_heads", default=config.count("linear_num_heads", default=32))
    width = own.count("head_dim", default=config.count("linear_head_dim", default=128))
    return GatedDelta(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=width,
        value_dim=width,
        conv_width=own.count("short_conv_kernel_size", default=config.count("linear_conv_kernel_dim", default=4)),
        norm_eps=eps,
        channel_rank=width,
    )


def _kinds(config: Fields) -> list[str]:
    """Of each layer: by `layer_types`, by lists of layers counted from 1 on, or every fourth one but the first."""
    count = reading.num_layers(config)
    own = config.inner("linear_attn_config")
    full, linear = own.sizes("full_attn_layers"), own.sizes("kda_layers")
    stated = reading.checked_layer_types(config, _KINDS)
    if stated is not None or full is None or linear is None:
        return stated or [_KINDS[layer > 0 and layer % 4 == 0] for layer in range(count)]
    if sorted((*full, *linear)) != list(range(1, count + 1)):
        raise ConfigError(
            what="the model's full_attn_layers and kda_layers are not all of its layers",
            why=f"they must name each of the layers 1 to {count} once",
            fix="check linear_attn_config",
        )
    return [_KINDS[layer in full] for layer in range(1, count + 1)]


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *BESIDE_QUERIES,
    Rename("model.layers.*.self_attn.q_proj", "layers.*.attn.q_up", or_else="layers.*.attn.mix.q"),
    Fuse("layers.*.attn.mix", k="model.layers.*.self_attn.k_proj", v="model.layers.*.self_attn.v_proj"),
    *in_layers(
        {
            "self_attn.q_conv1d": "attn.conv.q",
            "self_attn.k_conv1d": "attn.conv.k",
            "self_attn.v_conv1d": "attn.conv.v",
            "self_attn.b_proj": "attn.rates.b",
            "self_attn.f_a_proj": "attn.low.down.a",
            "self_attn.f_b_proj": "attn.low.a",
            "self_attn.g_a_proj": "attn.low.down.z",
            "self_attn.g_b_proj": "attn.low.z",
            "self_attn.o_norm": "attn.norm",
            "block_sparse_moe.shared_experts.gate_proj": "mlp.shared.gate_up.gate",
            "block_sparse_moe.shared_experts.up_proj": "mlp.shared.gate_up.up",
            "block_sparse_moe.shared_experts.down_proj": "mlp.shared.down",
            # transformers writes dense layers so.
            "block_sparse_moe.gate_proj": "mlp.gate_up.gate",
            "block_sparse_moe.up_proj": "mlp.gate_up.up",
            "block_sparse_moe.down_proj": "mlp.down",
        }
    ),
    Exact("model.layers.*.self_attn.A_log", "layers.*.attn.a_log.weight"),
    Exact("model.layers.*.self_attn.dt_bias", "layers.*.attn.dt_bias.weight"),
    *FEED_FORWARD,
    *BLOCK_SPARSE_EXPERTS,
    Exact("model.layers.*.block_sparse_moe.gate.e_score_correction_bias", "layers.*.mlp.choose.bias"),
)
make = pre_norm
