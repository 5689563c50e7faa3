"""Qwen2-Audio: Whisper's encoder before a Qwen2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bough.config.audio import POOLED, read_hearing
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hearing import HEARING
from bough.models.makers import pre_norm
from bough.models.seeing import BODIES, seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import PROJECTORS
from bough.weights.mapping import Rename

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    facts = read_inside(config)
    hearing = read_hearing(config)
    projector = hearing.block.hidden * facts.hidden + facts.hidden
    return replace(facts, tower=tower_of(config, hearing.tower(facts.hidden, projector, merged=POOLED)))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.hearing_tower import PooledHearing

    return PooledHearing(read_hearing(Fields(facts.config)), facts.hidden, build)


WEIGHTS = seeing_weights(
    TEXT,
    HEARING,
    ("audio_tower.", "model.audio_tower."),
    ((Rename("linear", "tower.project"),), PROJECTORS),
    bodies=(*BODIES, ("language_model.model.model.", "language_model.")),
)
make = with_tower(pre_norm, _tower)
