"""Qwen3.5 and its tower, which is Qwen3-VL's without features for further layers."""

from __future__ import annotations

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import qwen3_5
from bough.models.makers import pre_norm
from bough.models.qwen2_vl import PREFIXES
from bough.models.qwen3_5 import TURNS
from bough.models.qwen3_vl import TOWER, make_tower, seeing
from bough.models.seeing import seeing_weights, with_tower


def read(config: Fields) -> ModelFacts:
    return seeing(qwen3_5.read(config, **TURNS), config)


WEIGHTS = seeing_weights(qwen3_5.WEIGHTS, TOWER, PREFIXES)
make = with_tower(pre_norm, make_tower)
