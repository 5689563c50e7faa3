"""Gemma 4, which also sees: means of squares of patches of images in their own shapes. In larger ones, tokens of an image
see each other in both directions in layers with windows. E2B and E4B also hear, which is not served."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.gemma4_vision import read_gemma4_vision
from bough.config.model_facts import ModelFacts
from bough.models import gemma4
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.weights.mapping import Exact, Outside, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower

_LEFT_OUT: Final = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131_072,
}
"""What published files don't say, since it is transformers' default."""


def read(config: Fields) -> ModelFacts:
    facts = gemma4.read(config.put(**{key: value for key, value in _LEFT_OUT.items() if not config.has(key)}))
    if not config.has("vision_config"):
        return facts
    atomic = config.any("use_bidirectional_attention") == "vision"
    return replace(facts, tower=tower_of(config, read_gemma4_vision(config).tower(facts.hidden, atomic=atomic)))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.gemma4_tower import Gemma4Tower

    return Gemma4Tower(read_gemma4_vision(Fields(facts.config)), facts.hidden, build)


make = with_tower(gemma4.make, _tower)


def _clipped(source: str, target: str) -> tuple[Rule, ...]:
    """A product and its bounds."""
    bounds = [Exact(f"{source}.{each}", f"{target}.{each}") for each in _BOUNDS]
    return Rename(f"{source}.linear", f"{target}.linear"), *bounds


_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
_BLOCK: Final = "encoder.layers.*."
_TOWER: Final[tuple[Rule, ...]] = (
    Rename("patch_embedder.input_proj", "tower.patches"),
    Exact("patch_embedder.position_embedding_table", "tower.positions.weight"),
    Exact("std_bias", "tower.shift.weight"),
    Exact("std_scale", "tower.stretch.weight"),
    *(
        Rename(f"{_BLOCK}{source}", f"tower.blocks.*.{target}")
        for source, target in {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "after_attn_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "after_mlp_norm",
            "self_attn.q_norm": "attn.q_norm",
            "self_attn.k_norm": "attn.k_norm",
        }.items()
    ),
    *(rule for part in "qkv" for rule in _clipped(f"{_BLOCK}self_attn.{part}_proj", f"tower.blocks.*.attn.{part}")),
    *_clipped(f"{_BLOCK}self_attn.o_proj", "tower.blocks.*.attn.out"),
    *(
        rule
        for part in ("gate", "up", "down")
        for rule in _clipped(f"{_BLOCK}mlp.{part}_proj", f"tower.blocks.*.mlp.{part}")
    ),
)
WEIGHTS = seeing_weights(
    gemma4.WEIGHTS,
    _TOWER,
    ("vision_tower.", "model.vision_tower."),
    ((Rename("embedding_projection", "tower.project"),), ("embed_vision.", "model.embed_vision.")),
    ((Outside("audio_tower."), Outside("embed_audio.")), ("", "model.")),
)
