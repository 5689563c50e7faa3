"""MiniCPM3: attention over latents in dense layers, with multipliers of embeddings, of what blocks add, and of logits."""

from __future__ import annotations

from typing import Any

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.deepseek import LATENTS
from bough.models.hf_names import ENDS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    attention = reading.mla(config, interleaved=False, eps=1e-5)
    ffns = [reading.dense(config)] * len(attention)
    norm = reading.rms_norm(config, default=1e-5)
    tied = config.flag("tie_word_embeddings", default=True)
    scales = multipliers(config, embed=12.0, depth=1.4, base=256.0)
    return reading.decoder(config, attention, ffns, norm=norm, tie_embeddings=tied, **scales)


def multipliers(config: Fields, *, embed: float, depth: float, base: float) -> dict[str, Any]:
    """As fields of `ModelFacts`; what each is made of where the config doesn't say."""
    return {
        "embed_scale": config.number("scale_emb", default=embed),
        "residual_scale": config.number("scale_depth", default=depth) / reading.num_layers(config) ** 0.5,
        "logit_scale": config.number("dim_model_base", default=base) / config.count("hidden_size"),
    }


WEIGHTS = Mapping(*ENDS, *NORMS, *LATENTS, *FEED_FORWARD)
make = pre_norm
