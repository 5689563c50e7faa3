"""Code World Model: Llama with windows in three layers of four."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.llama import WEIGHTS, make

__all__ = ["WEIGHTS", "make", "read"]


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 128)
    windows = reading.windows(config, lambda layer: layer % 4 != 0, default=8192)
    attention = reading.gqa(
        config, width=width, windows=windows, ropes=reading.same_rope(config, width, theta=1_000_000.0, stated=True)
    )
    norm = reading.rms_norm(config, default=1e-5)
    return reading.decoder(config, attention, [reading.dense(config)] * len(attention), norm=norm)
