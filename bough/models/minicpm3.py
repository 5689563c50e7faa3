"""MiniCPM3: attention over latents in dense layers, with multipliers of embeddings, of what blocks add, and of logits."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.deepseek import LATENTS
from bough.models.hf_names import ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    attention = reading.mla(config, interleaved=False)
    ffns = [reading.dense(config)] * len(attention)
    norm = reading.rms_norm(config, default=1e-5)
    return reading.decoder(config, attention, ffns, norm=norm, **multipliers(config))


def multipliers(config: Fields) -> dict[str, float]:
    """As fields of `ModelFacts`."""
    hidden = config.count("hidden_size")
    return {
        "embed_scale": config.number("scale_emb", default=1.0),
        "residual_scale": config.number("scale_depth", default=1.0) / reading.num_layers(config) ** 0.5,
        "logit_scale": config.number("dim_model_base", default=hidden) / hidden,
    }


WEIGHTS = Mapping(*ENDS, *NORMS, *LATENTS, *FEED_FORWARD)
make = pre_norm
