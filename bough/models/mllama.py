"""Llama 3.2 Vision: Llama 3.1 with further layers between its own, which read images by gated cross attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.mllama import read_mllama
from bough.config.model_facts import Cross, HeadNorms, Mixer, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS, in_layers
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.weights.mapping import Exact, Fuse, Mapping, Rename, Rule

if TYPE_CHECKING:
    from torch import nn

    from bough.layers.build import Build
    from bough.layers.decoder import Decoder
    from bough.layers.parts import Parts
    from bough.layers.tower import Tower

_CROSS: Final = [3, 8, 13, 18, 23, 28, 33, 38]
"""Layers with cross attention, where the config doesn't say."""
_UNSPOKEN: Final = 8
"""Rows of the embedding behind the vocabulary: the first is that of the image's mark."""


def read(config: Fields) -> ModelFacts:
    vision, norm = read_mllama(config), reading.rms_norm(config, default=1e-5)
    attention = reading.gqa(config, ropes=reading.same_rope(config, reading.head_dim(config), theta=500_000.0))
    heads = attention[0]
    cross = Cross(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        scale=heads.scale,
        positions=vision.positions,
        head_norms=HeadNorms(norm=norm),
        gated=True,
    )
    listed = config.sizes("cross_attention_layers")
    crossing = _CROSS if listed is None else listed
    mixers: list[Mixer] = [cross if layer in crossing else each for layer, each in enumerate(attention)]
    ffns = [reading.dense(config)] * len(mixers)
    tower = tower_of(config, vision.tower(config.count("hidden_size")))
    vocab = config.count("vocab_size") + _UNSPOKEN
    return reading.decoder(config.put(vocab_size=vocab), mixers, ffns, norm=norm, unspoken=_UNSPOKEN, tower=tower)


def _block(parts: Parts, layer: int) -> nn.Module:
    from bough.layers.blocks import GatedCrossBlock, PreNormBlock

    (mixer,) = parts.layer(layer).mixers
    return (GatedCrossBlock if isinstance(mixer, Cross) else PreNormBlock)(parts, layer)


def _decoder(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.decoder import Decoder

    return Decoder(facts, build, _block)


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.mllama_tower import MllamaTower

    return MllamaTower(read_mllama(Fields(facts.config)), facts.hidden, build)


def _blocks(theirs: str, ours: str) -> tuple[Rule, ...]:
    return (
        Rename(f"{theirs}.layers.*.input_layernorm", f"{ours}.*.attn_norm"),
        Rename(f"{theirs}.layers.*.post_attention_layernorm", f"{ours}.*.mlp_norm"),
        Fuse(
            f"{ours}.*.qkv",
            q=f"{theirs}.layers.*.self_attn.q_proj",
            k=f"{theirs}.layers.*.self_attn.k_proj",
            v=f"{theirs}.layers.*.self_attn.v_proj",
        ),
        Rename(f"{theirs}.layers.*.self_attn.o_proj", f"{ours}.*.out"),
        Rename(f"{theirs}.layers.*.mlp.fc1", f"{ours}.*.mlp.up"),
        Rename(f"{theirs}.layers.*.mlp.fc2", f"{ours}.*.mlp.down"),
    )


_TEXT: Final = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *FEED_FORWARD,
    Fuse(
        "layers.*.cross.qkv",
        q="model.layers.*.cross_attn.q_proj",
        k="model.layers.*.cross_attn.k_proj",
        v="model.layers.*.cross_attn.v_proj",
    ),
    *in_layers(
        {"cross_attn.o_proj": "cross.out", "cross_attn.q_norm": "cross.q_norm", "cross_attn.k_norm": "cross.k_norm"}
    ),
    Exact("model.layers.*.cross_attn_attn_gate", "layers.*.cross_gate.weight"),
    Exact("model.layers.*.cross_attn_mlp_gate", "layers.*.mlp_gate.weight"),
)
_VISION: Final[tuple[Rule, ...]] = (
    Rename("patch_embedding", "tower.patches"),
    Exact("class_embedding", "tower.class_token.weight"),
    Exact("gated_positional_embedding.embedding", "tower.places.in_tile.weight"),
    Rename("gated_positional_embedding.tile_embedding", "tower.places.in_image"),
    Exact("gated_positional_embedding.gate", "tower.places.gate.weight"),
    *(
        rule
        for end in ("pre", "post")
        for rule in (
            Rename(f"{end}_tile_positional_embedding.embedding", f"tower.{end}_tiles.table"),
            Exact(f"{end}_tile_positional_embedding.gate", f"tower.{end}_tiles.gate.weight"),
            Rename(f"layernorm_{end}", f"tower.{end}_norm"),
        )
    ),
    *_blocks("transformer", "tower.blocks"),
    *_blocks("global_transformer", "tower.global_blocks"),
    Exact("global_transformer.layers.*.gate_attn", "tower.global_blocks.*.attn_gate.weight"),
    Exact("global_transformer.layers.*.gate_ffn", "tower.global_blocks.*.mlp_gate.weight"),
)
_PROJECTOR: Final[tuple[Rule, ...]] = (Rename("multi_modal_projector", "tower.project"),)
WEIGHTS = seeing_weights(_TEXT, _VISION, ("vision_model.", "model.vision_model."), (_PROJECTOR, ("", "model.")))
make = with_tower(_decoder, _tower)
