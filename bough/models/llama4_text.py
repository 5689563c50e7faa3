"""Llama 4 Scout and Maverick, which also see: their language model alone."""

from __future__ import annotations

from bough.models import llama4
from bough.models.text_of import text_weights

read = llama4.read
make = llama4.make
WEIGHTS = text_weights(llama4.WEIGHTS)
