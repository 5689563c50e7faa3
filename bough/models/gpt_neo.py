"""GPT-Neo: GPT-2's block, windows in every other layer, and scores that are not scaled."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, Gqa, LearnedPositions, ModelFacts
from bough.core.errors import ConfigError
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Fuse, Ignore, Mapping, Rename


def read(config: Fields) -> ModelFacts:
    config = config.also(num_attention_heads="num_heads", num_hidden_layers="num_layers")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    window = config.count("window_size", default=256)
    attention = [
        Gqa(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            scale=1.0,
            window=window if kind == "local" else None,
            out_bias=True,
        )
        for kind in _kinds(config)
    ]
    ffn = Dense(
        intermediate=config.count("intermediate_size", default=4 * hidden),
        activation=config.choice(reading.ACTIVATIONS, "activation_function", default="gelu_new"),
        gated=False,
        bias=True,
    )
    positions = config.count("max_position_embeddings", default=2048)
    return reading.decoder(
        config,
        attention,
        [ffn] * len(attention),
        norm=reading.layer_norm(config, "layer_norm_epsilon"),
        max_context=positions,
        positions=LearnedPositions(num_positions=positions),
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
    )


def _kinds(config: Fields) -> list[str]:
    """By layer: "global" or "local". `attention_types` is a list of (kinds, how often they are repeated)."""
    count, known = reading.num_layers(config), ("global", "local")
    if config.has("attention_layers"):
        return config.words("attention_layers", known, count) or []
    try:
        listed = [kind for kinds, times in config.any("attention_types") or () for _ in range(times) for kind in kinds]
    except (TypeError, ValueError) as error:
        raise ConfigError(what="the model's config has senseless attention_types", fix="check config.json") from error
    kinds = Fields({"attention_types": listed}).words("attention_types", known, count)
    return kinds or [known[layer % 2] for layer in range(count)]


WEIGHTS = Mapping(
    Rename("transformer.wte", "embed.tokens"),
    Rename("transformer.wpe", "embed.positions"),
    Rename("transformer.ln_f", "norm"),
    Rename("lm_head", "head"),
    Fuse(
        "layers.*.attn.qkv",
        q="transformer.h.*.attn.attention.q_proj",
        k="transformer.h.*.attn.attention.k_proj",
        v="transformer.h.*.attn.attention.v_proj",
    ),
    *in_layers(
        {
            "ln_1": "attn_norm",
            "attn.attention.out_proj": "attn.out",
            "ln_2": "mlp_norm",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        "transformer.h",
    ),
    Ignore("transformer.h.*.attn.attention"),
)
make = pre_norm
