"""OLMo 3: OLMo 2 with windows in three layers of four; what stretches the context is in the fourth alone."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.olmo2 import WEIGHTS, make, with_attention

__all__ = ["WEIGHTS", "make", "read"]


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config)
    windows = reading.windows(config, lambda layer: (layer + 1) % 4 != 0, default=4096)
    theta = config.number("rope_theta", default=500_000.0)
    return with_attention(
        config, windows, reading.ropes_by_window(config, width, windows, theta=theta, theta_local=theta)
    )  # fmt: skip
