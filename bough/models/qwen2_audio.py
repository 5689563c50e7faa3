"""Qwen2-Audio: Whisper's encoder before a Qwen2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.audio import read_hearing
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.makers import pre_norm
from bough.models.seeing import BODIES, seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import PROJECTORS
from bough.weights.mapping import Exact, Fuse, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    facts = read_inside(config)
    return replace(facts, tower=tower_of(config, read_hearing(config).tower(facts.hidden)))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.hearing_tower import HearingTower

    return HearingTower(read_hearing(Fields(facts.config)), facts.hidden, build)


TOWER: Final[tuple[Rule, ...]] = (
    Rename("conv1", "tower.conv1"),
    Rename("conv2", "tower.conv2"),
    Exact("embed_positions.weight", "tower.positions.weight"),
    Rename("layer_norm", "tower.norm"),
    Rename("layers.*.self_attn_layer_norm", "tower.blocks.*.attn_norm"),
    Rename("layers.*.final_layer_norm", "tower.blocks.*.mlp_norm"),
    Fuse(
        "tower.blocks.*.attn.qkv",
        q="layers.*.self_attn.q_proj",
        k="layers.*.self_attn.k_proj",
        v="layers.*.self_attn.v_proj",
    ),
    Rename("layers.*.self_attn.out_proj", "tower.blocks.*.attn.out"),
    Rename("layers.*.fc1", "tower.blocks.*.mlp.up"),
    Rename("layers.*.fc2", "tower.blocks.*.mlp.down"),
)
WEIGHTS = seeing_weights(
    TEXT,
    TOWER,
    ("audio_tower.", "model.audio_tower."),
    ((Rename("linear", "tower.project"),), PROJECTORS),
    bodies=(*BODIES, ("language_model.model.model.", "language_model.")),
)
make = with_tower(pre_norm, _tower)
