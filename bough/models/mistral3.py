"""Mistral Small 3.1 and later, Ministral 3, which also see: their language model alone."""

from __future__ import annotations

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import ministral, mistral
from bough.models.text_of import text_weights


def read(config: Fields) -> ModelFacts:
    if config.any("text_model_type") == "ministral3":
        return ministral.read(config)
    return mistral.read(config)


make = mistral.make
WEIGHTS = text_weights(mistral.WEIGHTS)
