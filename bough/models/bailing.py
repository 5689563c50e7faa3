"""Ling and Ring (Bailing) 1 and 2: fused queries, keys and values; experts beside shared ones, in the second generation
chosen as DeepSeek V3 chooses them and with half of each head normed and rotated."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts, Moe
from bough.core.errors import UnsupportedModel
from bough.models.hf_names import EXPERTS, FEED_FORWARD, NORMS, SHARED_EXPERTS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Beyond, Exact, Mapping, Rename, Split


def read(config: Fields) -> ModelFacts:
    config = config.also(n_shared_experts="num_shared_experts")
    if config.flag("norm_head"):
        raise UnsupportedModel(what="the model's config sets norm_head", why="no released checkpoint does")
    width = reading.head_dim(config)
    norm = reading.rms_norm(config, default=1e-5)
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width, theta=600_000.0),
        head_norms=HeadNorms(norm=norm) if config.flag("use_qk_norm") else None,
        qkv_bias=config.flag("use_qkv_bias") or config.flag("use_bias"),
        out_bias=config.flag("use_bias"),
    )
    return reading.decoder(config, attention, reading.dense_first(config, _experts(config)), norm=norm)


def _experts(config: Fields) -> Moe:
    if config.any("score_function") == "sigmoid" or config.flag("moe_router_enable_expert_bias"):
        return reading.grouped_sigmoid(config, renormalise=config.flag("norm_topk_prob", default=True))
    return reading.moe(
        config,
        "num_experts",
        renormalise=config.flag("norm_topk_prob", default=True),
        shared_intermediate=config.size("n_shared_experts", default=0) * config.count("moe_intermediate_size"),
        shared_gated=False,
    )


WEIGHTS = Mapping(
    Rename("model.word_embeddings", "embed.tokens"),
    Rename("model.norm", "norm"),
    Rename("lm_head", "head"),
    *NORMS,
    Split("model.layers.*.attention.query_key_value", "layers.*.attn.qkv", parts=("q", "k", "v")),
    *in_layers(
        {
            "attention.dense": "attn.out",
            "attention.query_layernorm": "attn.q_norm",
            "attention.key_layernorm": "attn.k_norm",
        }
    ),
    *FEED_FORWARD,
    *EXPERTS,
    *SHARED_EXPERTS,
    Exact("model.layers.*.mlp.gate.expert_bias", "layers.*.mlp.choose.bias"),
    Beyond("model.layers"),
)
make = pre_norm
