"""BLOOM: positions as slopes of scores (ALiBi), normed embeddings, layer norms with biases."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, ModelFacts
from bough.core.errors import UnsupportedModel
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Rename, Split


def read(config: Fields) -> ModelFacts:
    config = config.also(hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer")
    if config.flag("apply_residual_connection_post_layernorm"):
        raise UnsupportedModel(what="apply_residual_connection_post_layernorm", why="this is not implemented")
    hidden = config.count("hidden_size")
    ropes = (None,) * reading.num_layers(config)
    ffn = Dense(intermediate=4 * hidden, activation="gelu_tanh", gated=False, bias=True)
    return reading.decoder(
        config,
        reading.gqa(config, ropes=ropes, qkv_bias=True, out_bias=True, alibi=1.0),
        [ffn] * len(ropes),
        norm=reading.layer_norm(config, "layer_norm_epsilon"),
        embed_norm=True,
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        max_context=config.count("seq_length", default=2048),
    )


WEIGHTS = Mapping(
    Rename("transformer.word_embeddings", "embed.tokens"),
    Rename("transformer.word_embeddings_layernorm", "embed.norm"),
    Rename("transformer.ln_f", "norm"),
    Rename("lm_head", "head"),
    Split("transformer.h.*.self_attention.query_key_value", "layers.*.attn.qkv", parts=("q", "k", "v"), by_head=True),
    *in_layers(
        {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "mlp_norm",
            "self_attention.dense": "attn.out",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        "transformer.h",
    ),
)
make = pre_norm
