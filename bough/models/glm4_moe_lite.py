"""GLM-4.7-Flash: DeepSeek V3's attention over latents and experts, with defaults of its own."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.deepseek import WEIGHTS, make

__all__ = ["WEIGHTS", "make", "read"]


def read(config: Fields) -> ModelFacts:
    experts = reading.grouped_sigmoid(config, scale=config.number("routed_scaling_factor", default=1.8))
    ffns = reading.dense_first(config, experts, default=1)
    norm = reading.rms_norm(config, default=1e-5)
    return reading.decoder(config, reading.mla(config, eps=1e-5), ffns, norm=norm)
