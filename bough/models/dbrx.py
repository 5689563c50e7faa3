"""DBRX: layer norms without biases, clamped queries, keys and values, and four of sixteen experts in every layer."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Moe, NormFacts
from bough.core.errors import UnsupportedModel
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Rename, Split, Stacked


def read(config: Fields) -> ModelFacts:
    config = config.also(
        hidden_size="d_model",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    )
    attn, ffn = config.inner("attn_config"), config.inner("ffn_config")
    heads = {"num_key_value_heads": attn.count("kv_n_heads"), "rope_theta": attn.number("rope_theta", default=10_000.0)}
    config = config.put(**heads)
    attention = reading.gqa(
        config,
        ropes=reading.same_rope(config, reading.head_dim(config)),
        clip=attn.positive("clip_qkv", default=0.0) or None,
    )
    return reading.decoder(config, attention, [_experts(ffn)] * len(attention), norm=NormFacts(eps=1e-5, kind="layer"))


def _experts(config: Fields) -> Moe:
    power = config.raw.get("moe_normalize_expert_weights", 1.0)
    if power not in (None, 1):
        raise UnsupportedModel(what=f"the model's moe_normalize_expert_weights {power!r}", why="known: 1, null")
    return Moe(
        num_experts=config.count("moe_num_experts"),
        experts_per_token=config.count("moe_top_k"),
        intermediate=config.count("ffn_hidden_size"),
        renormalise=power is not None,
        activation=config.inner("ffn_act_fn").choice(reading.ACTIVATIONS, "name", default="silu"),
    )


_EXPERTS = "transformer.blocks.*.ffn.experts.mlp"
_TO = "layers.*.mlp.experts"
WEIGHTS = Mapping(
    Rename("transformer.wte", "embed.tokens"),
    Rename("transformer.norm_f", "norm"),
    Rename("lm_head", "head"),
    Split("transformer.blocks.*.norm_attn_norm.attn.Wqkv", "layers.*.attn.qkv", parts=("q", "k", "v")),
    *in_layers(
        {
            "norm_attn_norm.norm_1": "attn_norm",
            "norm_attn_norm.attn.out_proj": "attn.out",
            "norm_attn_norm.norm_2": "mlp_norm",
            "ffn.router.layer": "mlp.router",
        },
        "transformer.blocks",
    ),
    Stacked(f"{_EXPERTS}.w1", _TO, parts=("gate",), flat=True),
    Stacked(f"{_EXPERTS}.v1", _TO, parts=("up",), flat=True),
    Stacked(f"{_EXPERTS}.w2", _TO, parts=("down",), flat=True, inputs_first=True),
)
make = pre_norm
