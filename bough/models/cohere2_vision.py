"""Command A Vision: tiles of an image and the whole image, four patches a position, before the second Command model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.model_facts import ModelFacts
from bough.config.vit import cohere2_vit
from bough.models import cohere2
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.vit_vision import PROJECTORS, TOWERS, VIT, tiled
from bough.weights.mapping import Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def _inner(config: Fields) -> int:
    return config.count("alignment_intermediate_size", default=36_864)


def read(config: Fields) -> ModelFacts:
    facts, vit = cohere2.read(config), cohere2_vit(config)
    by, inner = config.count("downsample_factor", default=2), _inner(config)
    projector = vit.block.hidden * by * by * inner + inner + inner // 2 * facts.hidden + facts.hidden
    tiles = processor_fields(config).count("max_patches", default=12) + 1
    tower = tiled(vit, width=facts.hidden, projector=projector, positions=(vit.side // by) ** 2, tiles=tiles)
    return replace(facts, tower=tower_of(config, tower))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.layers.projectors import ShuffledGate
    from bough.layers.tower import alone
    from bough.layers.vit import TiledTower

    config = Fields(facts.config)
    vit = cohere2_vit(config)
    widths = (vit.block.hidden, _inner(config), facts.hidden)
    project = ShuffledGate(widths, alone(build), side=vit.side, by=config.count("downsample_factor", default=2))
    return TiledTower(vit, project, facts.hidden, build)


PROJECTOR: Final[tuple[Rule, ...]] = (
    Rename("linear_1", "tower.project.up"),
    Rename("linear_2", "tower.project.down"),
)
WEIGHTS = seeing_weights(cohere2.WEIGHTS, VIT, TOWERS, (PROJECTOR, PROJECTORS))
make = with_tower(cohere2.make, _tower)
