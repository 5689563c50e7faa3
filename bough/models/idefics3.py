"""Idefics 3 and SmolVLM 1 and 2: tiles of an image and the image itself, squares of patches a position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bough.config.fields import Fields
from bough.config.image_facts import image_facts, processor_fields
from bough.config.model_facts import ModelFacts
from bough.config.vit import LONGEST, idefics3_vit, is_smolvlm
from bough.models.makers import pre_norm
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import VIT, tiled
from bough.weights.mapping import Rename

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    facts, vit = read_inside(config), idefics3_vit(config)
    by = config.count("scale_factor", default=2)
    longest = image_facts(processor_fields(config)).edge("longest_edge", LONGEST)
    along = -(-longest // (vit.side * vit.patch))
    projector = vit.block.hidden * by * by * facts.hidden
    tower = tiled(
        vit, width=facts.hidden, projector=projector, positions=(vit.side // by) ** 2, tiles=along * along + 1,
        video=is_smolvlm(config),
    )  # fmt: skip
    return replace(facts, tower=tower_of(config, tower))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.layers.projectors import ShuffledLinear
    from bough.layers.tower import alone
    from bough.layers.vit import TiledTower

    config = Fields(facts.config)
    vit = idefics3_vit(config)
    widths = (vit.block.hidden, facts.hidden)
    project = ShuffledLinear(widths, alone(build), side=vit.side, by=config.count("scale_factor", default=2))
    return TiledTower(vit, project, facts.hidden, build)


WEIGHTS = seeing_weights(
    TEXT,
    VIT,
    ("model.vision_model.",),
    ((Rename("modality_projection.proj", "tower.project.linear"),), ("model.connector.",)),
    bodies=(("model.text_model.", ""),),
)
make = with_tower(pre_norm, _tower)
