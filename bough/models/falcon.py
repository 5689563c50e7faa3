"""Falcon 1 and 2: both halves of a block in parallel; heads share keys and values; rotary positions, or slopes of scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, ModelFacts
from bough.models.hf_names import in_layers
from bough.models.makers import Make, parallel, pre_norm, two_norm_parallel
from bough.weights.mapping import Mapping, Rename, Split

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder


def read(config: Fields) -> ModelFacts:
    config = config.also(num_attention_heads="n_head", num_hidden_layers="n_layer")
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    kv_heads = 1 if config.flag("multi_query", default=True) else heads
    if config.flag("new_decoder_architecture"):
        kv_heads = config.count("num_kv_heads", default=heads)
    sizes = config.put(num_key_value_heads=kv_heads)
    width = reading.head_dim(config)
    slopes = config.flag("alibi")
    ropes: reading.Ropes = reading.same_rope(config, width)
    ropes = (None,) * len(ropes) if slopes else ropes
    bias = config.flag("bias")
    attention = reading.gqa(sizes, ropes=ropes, qkv_bias=bias, out_bias=bias, alibi=width**-0.5 if slopes else None)
    ffn = Dense(
        intermediate=config.count("ffn_hidden_size", default=4 * hidden),
        activation=config.choice(reading.ACTIVATIONS, "activation", default="gelu"),
        gated=False,
        bias=bias,
    )
    return reading.decoder(
        config,
        attention,
        [ffn] * len(ropes),
        norm=reading.layer_norm(config, "layer_norm_epsilon"),
        block_norms=1 if _block(config) is parallel else 2,
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        max_context=config.count("max_position_embeddings", default=2048),
    )


def _block(config: Fields) -> Make:
    if config.flag("new_decoder_architecture"):
        return parallel if config.any("num_ln_in_parallel_attn") == 1 else two_norm_parallel
    return parallel if config.flag("parallel_attn", default=True) else pre_norm


def make(facts: ModelFacts, build: Build) -> Decoder:
    return _block(Fields(facts.config))(facts, build)


WEIGHTS = Mapping(
    Rename("transformer.word_embeddings", "embed.tokens"),
    Rename("transformer.ln_f", "norm"),
    Rename("lm_head", "head"),
    Split("transformer.h.*.self_attention.query_key_value", "layers.*.attn.qkv", parts=("q", "k", "v"), by_head=True),
    *in_layers(
        {
            "input_layernorm": "attn_norm",
            "ln_attn": "attn_norm",
            "ln_mlp": "mlp_norm",
            "post_attention_layernorm": "mlp_norm",
            "self_attention.dense": "attn.out",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        "transformer.h",
    ),
)
