"""LLaVA 1.5: patches of a CLIP tower, without its last block, through two products into a language model. Pixtral is written
in the same frame, with a tower of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.pixtral import is_pixtral
from bough.config.tower_facts import VitFacts
from bough.config.vit import llava_vit
from bough.models.makers import pre_norm
from bough.models.pixtral import TOWER as PIXTRAL, TOWERS as PIXTRALS, make_pixtral, with_pixtral
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import PROJECTORS, TOWERS, VIT, tiled, two_linears
from bough.weights.mapping import Rename, Rule

if TYPE_CHECKING:
    from torch import nn

    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    facts = read_inside(config)
    if is_pixtral(config):
        return with_pixtral(facts, config)
    vit = llava_vit(config)
    bias = config.flag("multimodal_projector_bias", default=True)
    projector = two_linears(vit.block.hidden, facts.hidden, bias=bias)
    tower = tiled(vit, width=facts.hidden, projector=projector, positions=vit.side**2, tiles=1)
    return replace(facts, tower=tower_of(config, tower))


def make_projector(facts: ModelFacts, vit: VitFacts, build: Build) -> nn.Module:
    from bough.layers.projectors import TwoLinears

    config = Fields(facts.config)
    return TwoLinears(
        (vit.block.hidden, facts.hidden),
        build,
        activation=config.choice(reading.ACTIVATIONS, "projector_hidden_act", default="gelu"),
        bias=config.flag("multimodal_projector_bias", default=True),
    )


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.layers.tower import alone
    from bough.layers.vit import TiledTower

    if is_pixtral(Fields(facts.config)):
        return make_pixtral(facts, build)
    vit = llava_vit(Fields(facts.config))
    return TiledTower(vit, make_projector(facts, vit, alone(build)), facts.hidden, build)


PROJECTOR: Final[tuple[Rule, ...]] = (
    Rename("linear_1", "tower.project.mlp.1"),
    Rename("linear_2", "tower.project.mlp.3"),
)
WEIGHTS = seeing_weights(TEXT, VIT, TOWERS, (PIXTRAL, PIXTRALS), (PROJECTOR, PROJECTORS))
make = with_tower(pre_norm, _tower)
