"""GPT-2: learned positions, layer norms with biases, matrices stored inputs first."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, Gqa, LearnedPositions, ModelFacts
from bough.core.errors import UnsupportedModel
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Ignore, Mapping, Rename, Split


def read(config: Fields) -> ModelFacts:
    config = config.also(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
    for unknown in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.flag(unknown):
            raise UnsupportedModel(what=f"the model's config sets {unknown}", why="this is not implemented")
    ropes = (None,) * reading.num_layers(config)
    return with_attention(config, reading.gqa(config, ropes=ropes, qkv_bias=True, out_bias=True))


def with_attention(config: Fields, attention: list[Gqa]) -> ModelFacts:
    hidden = config.count("hidden_size")
    ffn = Dense(
        intermediate=config.count("n_inner", default=4 * hidden),
        activation=config.choice(reading.ACTIVATIONS, "activation_function", default="gelu_new"),
        gated=False,
        bias=True,
    )
    positions = config.count("n_positions", default=1024)
    return reading.decoder(
        config,
        attention,
        [ffn] * len(attention),
        norm=reading.layer_norm(config, "layer_norm_epsilon"),
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        max_context=positions,
        positions=LearnedPositions(num_positions=positions),
    )


ENDS = (
    Rename("transformer.wte", "embed.tokens"),
    Rename("transformer.wpe", "embed.positions"),
    Rename("transformer.ln_f", "norm"),
    Rename("lm_head", "head"),
)
NORMS = in_layers({"ln_1": "attn_norm", "ln_2": "mlp_norm"}, "transformer.h")
WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    Split("transformer.h.*.attn.c_attn", "layers.*.attn.qkv", parts=("q", "k", "v"), inputs_first=True),
    Rename("transformer.h.*.attn.c_proj", "layers.*.attn.out", inputs_first=True),
    Rename("transformer.h.*.mlp.c_fc", "layers.*.mlp.up", inputs_first=True),
    Rename("transformer.h.*.mlp.c_proj", "layers.*.mlp.down", inputs_first=True),
    Ignore("transformer.h.*.attn"),
)
make = pre_norm
