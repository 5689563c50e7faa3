"""OPT and Galactica's kin: learned positions from the third on, ReLU; the 350M one norms after each half of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Dense, LearnedPositions, ModelFacts, NormFacts
from bough.models.hf_names import in_layers
from bough.models.makers import after_norm, pre_norm
from bough.weights.mapping import Fuse, Mapping, Rename

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder


def read(config: Fields) -> ModelFacts:
    bias = config.flag("enable_bias", default=True)
    affine = config.flag("layer_norm_elementwise_affine", default=True)
    before = config.flag("do_layer_norm_before", default=True)
    positions = config.count("max_position_embeddings", default=2048)
    hidden = config.count("hidden_size")
    width = config.count("word_embed_proj_dim", default=hidden)
    ropes = (None,) * reading.num_layers(config)
    ffn = Dense(
        intermediate=config.count("ffn_dim"),
        activation=config.choice(reading.ACTIVATIONS, "activation_function", default="relu"),
        gated=False,
        bias=bias,
    )
    return reading.decoder(
        config,
        reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias),
        [ffn] * len(ropes),
        norm=NormFacts(eps=1e-5, kind="layer", weight=affine, bias=affine),
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        embed_dim=None if width == hidden else width,
        max_context=positions,
        positions=LearnedPositions(num_positions=positions + 2, first=2),
        last_norm=before and not config.flag("_remove_final_layer_norm"),
    )


def make(facts: ModelFacts, build: Build) -> Decoder:
    before = Fields(facts.config).flag("do_layer_norm_before", default=True)
    return pre_norm(facts, build) if before else after_norm(facts, build)


WEIGHTS = Mapping(
    Rename("model.decoder.embed_tokens", "embed.tokens"),
    Rename("model.decoder.embed_positions", "embed.positions"),
    Rename("model.decoder.project_in", "embed.project_in"),
    Rename("model.decoder.project_out", "project_out"),
    Rename("model.decoder.final_layer_norm", "norm"),
    Rename("lm_head", "head"),
    Fuse(
        "layers.*.attn.qkv",
        q="model.decoder.layers.*.self_attn.q_proj",
        k="model.decoder.layers.*.self_attn.k_proj",
        v="model.decoder.layers.*.self_attn.v_proj",
    ),
    *in_layers(
        {
            "self_attn_layer_norm": "attn_norm",
            "final_layer_norm": "mlp_norm",
            "self_attn.out_proj": "attn.out",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        },
        "model.decoder.layers",
    ),
)
