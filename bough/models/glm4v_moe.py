"""GLM-4.5V and GLM-4.6V: GLM-4.5 with positions of three axes, and the tower of GLM-4.1V."""

from __future__ import annotations

from dataclasses import replace

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import glm4_moe
from bough.models.glm4v import SECTIONS, TOWER, make_tower, read_vision
from bough.models.qwen2_vl import PREFIXES
from bough.models.seeing import seeing_weights, tower_of, with_tower


def read(config: Fields) -> ModelFacts:
    facts = glm4_moe.read(config, bias=True, kinds={"mrope": "default"}, sections=SECTIONS)
    return replace(facts, tower=tower_of(config, read_vision(config).tower()))


WEIGHTS = seeing_weights(glm4_moe.WEIGHTS, TOWER, PREFIXES)
make = with_tower(glm4_moe.make, make_tower)
