"""Gemma 4, which also sees (E2B and E4B hear, too): its language model alone."""

from __future__ import annotations

from typing import Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import gemma4
from bough.models.text_of import text_weights

_LEFT_OUT: Final = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131_072,
}
"""What published files don't say, since it is transformers' default."""


def read(config: Fields) -> ModelFacts:
    return gemma4.read(config.put(**{key: value for key, value in _LEFT_OUT.items() if not config.has(key)}))


make = gemma4.make
WEIGHTS = text_weights(gemma4.WEIGHTS)
