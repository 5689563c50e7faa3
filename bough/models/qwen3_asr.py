"""Qwen3-ASR: Qwen3-Omni's encoder of sounds before a Qwen3, which transcribes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.omni import read_omni_hearing
from bough.models.makers import pre_norm
from bough.models.omni import CONVOLUTIONS, ENCODER
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import PROJECTORS
from bough.weights.mapping import Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    return replace(read_inside(config), tower=tower_of(config, read_omni_hearing(config, "3").tower()))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.omni_tower import ShrinkingTower

    return ShrinkingTower(read_omni_hearing(Fields(facts.config), "3"), build)


_PROJECTOR: Final[tuple[Rule, ...]] = (Rename("linear_1", "tower.before"), Rename("linear_2", "tower.project"))
WEIGHTS = seeing_weights(
    TEXT, (*ENCODER, *CONVOLUTIONS), ("audio_tower.", "model.audio_tower."), (_PROJECTOR, PROJECTORS)
)
make = with_tower(pre_norm, _tower)
