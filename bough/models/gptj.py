"""GPT-J: both halves of a block read one layer norm; neighbouring values are rotated together, in part of each head."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, ModelFacts
from bough.models.hf_names import in_layers
from bough.models.makers import parallel
from bough.weights.mapping import Fuse, Ignore, Mapping, Rename


def read(config: Fields) -> ModelFacts:
    config = config.also(
        hidden_size="n_embd",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
    )
    width = reading.head_dim(config)
    ropes = reading.same_rope(config, width, rotary_dim=config.count("rotary_dim", default=width), interleaved=True)
    ffn = Dense(
        intermediate=config.count("n_inner", default=4 * config.count("hidden_size")),
        activation=config.choice(reading.ACTIVATIONS, "activation_function", default="gelu_new"),
        gated=False,
        bias=True,
    )
    return reading.decoder(
        config,
        reading.gqa(config, ropes=ropes),
        [ffn] * len(ropes),
        norm=reading.layer_norm(config, "layer_norm_epsilon"),
        block_norms=1,
        head_bias=True,
    )


WEIGHTS = Mapping(
    Rename("transformer.wte", "embed.tokens"),
    Rename("transformer.ln_f", "norm"),
    Rename("lm_head", "head"),
    Fuse(
        "layers.*.attn.qkv",
        q="transformer.h.*.attn.q_proj",
        k="transformer.h.*.attn.k_proj",
        v="transformer.h.*.attn.v_proj",
    ),
    *in_layers(
        {"ln_1": "attn_norm", "attn.out_proj": "attn.out", "mlp.fc_in": "mlp.up", "mlp.fc_out": "mlp.down"},
        "transformer.h",
    ),
    Ignore("transformer.h.*.attn"),
)
make = parallel
