"""Gemma 3 of 4B and more, which also sees: its language model alone."""

from __future__ import annotations

from bough.models import gemma3
from bough.models.text_of import text_weights

read = gemma3.read
make = gemma3.make
WEIGHTS = text_weights(gemma3.WEIGHTS)
