"""MPT: positions as slopes of scores (ALiBi), layer norms and products without biases."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, ModelFacts
from bough.core.errors import UnsupportedModel
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Rename, Split


def read(config: Fields) -> ModelFacts:
    config = config.also(hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers")
    inner = config.inner("attn_config")
    if inner.flag("qk_ln") or inner.flag("prefix_lm") or not inner.flag("alibi", default=True):
        raise UnsupportedModel(
            what="this kind of MPT attention", why="only ALiBi is implemented, without qk_ln or prefix_lm"
        )
    hidden = config.count("hidden_size")
    ropes = (None,) * reading.num_layers(config)
    scale = inner.number("softmax_scale", default=reading.head_dim(config) ** -0.5)
    clip = inner.number("clip_qkv") if inner.any("clip_qkv") else None
    slopes = inner.number("alibi_bias_max", default=8.0)
    attention = reading.gqa(config, ropes=ropes, alibi=1.0, alibi_bias_max=slopes, clip=clip, scale=scale)
    ffn = Dense(intermediate=4 * hidden, activation="gelu", gated=False)
    return reading.decoder(
        config,
        attention,
        [ffn] * len(ropes),
        norm=reading.layer_norm(config, "layer_norm_epsilon", bias=False),
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        max_context=config.count("max_seq_len", default=2048),
    )


WEIGHTS = Mapping(
    Rename("transformer.wte", "embed.tokens"),
    Rename("transformer.norm_f", "norm"),
    Rename("lm_head", "head"),
    Split("transformer.blocks.*.attn.Wqkv", "layers.*.attn.qkv", parts=("q", "k", "v")),
    *in_layers(
        {
            "norm_1": "attn_norm",
            "norm_2": "mlp_norm",
            "attn.out_proj": "attn.out",
            "ffn.up_proj": "mlp.up",
            "ffn.down_proj": "mlp.down",
        },
        "transformer.blocks",
    ),
)
make = pre_norm
