"""Whisper: an encoder of sound, and a decoder whose layers read what it gave by cross attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.audio import NORM, read_hearing
from bough.config.fields import Fields
from bough.config.model_facts import Cross, Dense, Gqa, LayerFacts, LearnedPositions, ModelFacts
from bough.models.hearing import HEARING
from bough.models.hf_names import in_layers
from bough.models.seeing import with_tower
from bough.weights.mapping import Fuse, Mapping, Rename, renamed

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    hearing = read_hearing(config)
    hidden = config.count("d_model", default=384)
    heads = config.count("decoder_attention_heads", default=6)
    shape = {"num_heads": heads, "num_kv_heads": heads, "head_dim": hidden // heads, "scale": (hidden // heads) ** -0.5}
    layer = LayerFacts(
        mixers=(
            Gqa(**shape, qkv_bias=True, k_bias=False, out_bias=True),
            Cross(**shape, bias=True, positions=hearing.positions),
        ),
        ffn=Dense(
            intermediate=config.count("decoder_ffn_dim", default=1536),
            activation=config.choice(reading.ACTIVATIONS, "activation_function", default="gelu"),
            gated=False,
            bias=True,
        ),
    )
    positions = config.count("max_target_positions", default=448)
    return ModelFacts(
        architecture=config.architecture(),
        hidden=hidden,
        vocab=config.count("vocab_size", default=51_865),
        max_context=positions,
        norm=NORM,
        layers=(layer,) * config.count("decoder_layers", default=4),
        block_norms=3,
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        embed_scale=hidden**0.5 if config.flag("scale_embedding") else None,
        positions=LearnedPositions(num_positions=positions),
        tower=hearing.tower(hidden, required=True),
        config=config.raw,
    )


def _decoder(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.blocks import CrossBlock
    from bough.layers.decoder import Decoder

    return Decoder(facts, build, CrossBlock)


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.hearing_tower import HearingTower

    return HearingTower(read_hearing(Fields(facts.config)), build)


make = with_tower(_decoder, _tower)
WEIGHTS = Mapping(
    *(renamed(rule, lambda name: f"model.encoder.{name}") for rule in HEARING),
    Rename("model.decoder.embed_tokens", "embed.tokens"),
    Rename("model.decoder.embed_positions", "embed.positions"),
    Rename("model.decoder.layer_norm", "norm"),
    Rename("proj_out", "head"),
    *(
        Fuse(
            f"layers.*.{ours}.qkv",
            q=f"model.decoder.layers.*.{theirs}.q_proj",
            k=f"model.decoder.layers.*.{theirs}.k_proj",
            v=f"model.decoder.layers.*.{theirs}.v_proj",
        )
        for theirs, ours in (("self_attn", "attn"), ("encoder_attn", "cross"))
    ),
    *in_layers(
        {
            "self_attn_layer_norm": "attn_norm",
            "self_attn.out_proj": "attn.out",
            "encoder_attn_layer_norm": "cross_norm",
            "encoder_attn.out_proj": "cross.out",
            "final_layer_norm": "mlp_norm",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        },
        "model.decoder.layers",
    ),
)
