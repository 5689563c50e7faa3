"""Voxtral: Whisper's encoder over windows of 30 s, four tokens of it a position, before a Llama or Mistral."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.audio import merged_tokens, read_hearing
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hearing import HEARING
from bough.models.makers import pre_norm
from bough.models.seeing import BODIES, seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import PROJECTORS, two_linears
from bough.weights.mapping import Rename

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    facts, hearing = read_inside(config), read_hearing(config)
    merged = merged_tokens(hearing)
    projector = two_linears(merged * hearing.block.hidden, facts.hidden, bias=False)
    return replace(facts, tower=tower_of(config, hearing.tower(facts.hidden, projector, merged=merged)))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.hearing_tower import MergedHearing

    config = Fields(facts.config)
    activation = config.choice(reading.ACTIVATIONS, "projector_hidden_act", default="gelu")
    return MergedHearing(read_hearing(config), facts.hidden, activation, build)


WEIGHTS = seeing_weights(
    TEXT,
    HEARING,
    ("audio_tower.", "model.audio_tower."),
    ((Rename("linear_1", "tower.project.mlp.1"), Rename("linear_2", "tower.project.mlp.3")), PROJECTORS),
    bodies=(*BODIES, ("language_model.model.model.", "language_model.")),
)
make = with_tower(pre_norm, _tower)
