"""Gemma 3 of 4B and more, which also sees: its language model alone."""

from __future__ import annotations

from typing import Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import gemma3
from bough.models.text_of import text_weights

_LEFT_OUT: Final = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""What published files don't say, since it is transformers' default."""


def read(config: Fields) -> ModelFacts:
    return gemma3.read(config.put(**{key: value for key, value in _LEFT_OUT.items() if not config.has(key)}))


make = gemma3.make
WEIGHTS = text_weights(gemma3.WEIGHTS)
