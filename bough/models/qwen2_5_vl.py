"""Qwen2.5-VL: Qwen2-VL with a tower most of whose blocks see windows of an image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import qwen2
from bough.models.makers import pre_norm
from bough.models.qwen2_vl import ATTENTION, MERGER, PREFIXES, read_text
from bough.models.qwen_vision import read_vision
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.weights.mapping import Fuse, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    return replace(read_text(config), tower=tower_of(config, read_vision(config, "2.5").tower()))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.qwen_tower import QwenTower

    return QwenTower(read_vision(Fields(facts.config), "2.5"), build)


MLP: tuple[Rule, ...] = (
    Fuse("tower.blocks.*.mlp.gate_up", gate="blocks.*.mlp.gate_proj", up="blocks.*.mlp.up_proj"),
    Rename("blocks.*.mlp.down_proj", "tower.blocks.*.mlp.down"),
)
WEIGHTS = seeing_weights(qwen2.WEIGHTS, (*ATTENTION, *MERGER, *MLP), PREFIXES)
make = with_tower(pre_norm, _tower)
