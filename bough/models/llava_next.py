"""LLaVA-NeXT and LLaVA-OneVision: tiles of an image within a canvas that suits its shape, and the whole image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.anyres import canvases, most_tiles
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.vit import anyres_vit, is_onevision, usual_canvases
from bough.models.llava import PROJECTOR, make_projector
from bough.models.makers import pre_norm
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import PROJECTORS, TOWERS, VIT, tiled, two_linears
from bough.weights.mapping import Exact, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    facts, vit = read_inside(config), anyres_vit(config)
    bias = config.flag("multimodal_projector_bias", default=True)
    projector = two_linears(vit.block.hidden, facts.hidden, bias=bias) + facts.hidden
    side = vit.side * vit.patch
    sizes = canvases(config, usual_canvases(config))
    tiles = max(-(-height // side) * -(-width // side) for height, width in sizes)
    rows = max(-(-height // side) for height, _ in sizes) * vit.side
    tower = tiled(
        vit, width=facts.hidden, projector=projector, positions=vit.side**2, tiles=tiles + 1, video=is_onevision(config)
    )
    return replace(facts, tower=tower_of(config, replace(tower, max_positions=tower.max_positions + rows)))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.layers.tower import alone
    from bough.models.anyres_tower import AnyresTower

    config = Fields(facts.config)
    vit = anyres_vit(config)
    project = make_projector(facts, vit, alone(build))
    most = most_tiles(config) if is_onevision(config) else 0
    return AnyresTower(vit, project, facts.hidden, build, most_tiles=most)


ROW_END: Final[tuple[Rule, ...]] = (Exact("image_newline", "tower.row_end.weight"),)
WEIGHTS = seeing_weights(TEXT, VIT, TOWERS, (PROJECTOR, PROJECTORS), (ROW_END, ("", "model.")))
make = with_tower(pre_norm, _tower)
