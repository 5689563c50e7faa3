"""MiMo-7B: Qwen2's blocks. The layers that draft (`models/nextn.py`) are left out here."""

from __future__ import annotations

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import qwen2
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Outside


def read(config: Fields) -> ModelFacts:
    return qwen2.read(config)


WEIGHTS = Mapping(*qwen2.WEIGHTS.rules, Outside("model.mtp_layers."))
make = pre_norm
