"""LFM2-VL: LFM2 with SigLIP 2 over tiles and the whole image near its own shape, four patches a position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.lfm2_vl import read_lfm2_vl
from bough.config.model_facts import ModelFacts
from bough.core.errors import ConfigError
from bough.models import lfm2
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.vit_vision import PROJECTORS, TOWERS, VIT
from bough.weights.mapping import Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    kind = config.any("text_model_type")
    if kind not in (None, "lfm2"):
        raise ConfigError(
            what=f"the language model is of type {str(kind)[:60]!r}",
            why="this family is served with lfm2",
            fix="serve another checkpoint",
        )
    return replace(lfm2.read(config), tower=tower_of(config, read_lfm2_vl(config).tower()))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.lfm2_vl_tower import Lfm2VlTower

    return Lfm2VlTower(read_lfm2_vl(Fields(facts.config)), build)


PROJECTOR: Final[Sequence[Rule]] = (
    Rename("layer_norm", "tower.project.mlp.0"),
    Rename("linear_1", "tower.project.mlp.1"),
    Rename("linear_2", "tower.project.mlp.3"),
)
WEIGHTS = seeing_weights(lfm2.WEIGHTS, VIT, TOWERS, (PROJECTOR, PROJECTORS))
make = with_tower(lfm2.make, _tower)
