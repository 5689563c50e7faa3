"""Gemma 3n E2B and E4B, which also see and hear: their language model alone."""

from __future__ import annotations

from typing import Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import gemma3n
from bough.models.text_of import text_weights

_LEFT_OUT: Final = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
"""What published files don't say, since it is transformers' default."""


def read(config: Fields) -> ModelFacts:
    return gemma3n.read(config.put(**{key: value for key, value in _LEFT_OUT.items() if not config.has(key)}))


make = gemma3n.make
WEIGHTS = text_weights(gemma3n.WEIGHTS)
