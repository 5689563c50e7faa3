"""Mistral Small 3.1 and later, Ministral 3: a Mistral that sees images in their own shapes."""

from __future__ import annotations

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import ministral, mistral
from bough.models.llava import PROJECTOR
from bough.models.pixtral import MERGER, TOWER, TOWERS, make_pixtral, with_pixtral
from bough.models.seeing import seeing_weights, with_tower
from bough.models.vit_vision import PROJECTORS


def read(config: Fields) -> ModelFacts:
    text = ministral.read(config) if config.any("text_model_type") == "ministral3" else mistral.read(config)
    return with_pixtral(text, config) if config.has("vision_config") else text


make = with_tower(mistral.make, make_pixtral)
WEIGHTS = seeing_weights(mistral.WEIGHTS, TOWER, TOWERS, ((*PROJECTOR, *MERGER), PROJECTORS))
