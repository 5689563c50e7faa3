"""Mixtral: Mistral's attention, and in place of the feed-forward a mixture of experts whose chosen weights sum to 1."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, BLOCK_SPARSE_EXPERTS, ENDS, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    pairs = config.flag("rope_interleaved")
    ropes = reading.same_rope(config, reading.head_dim(config), theta=1_000_000.0, interleaved=pairs)
    attention = reading.gqa(config, windows=reading.windows(config, reading.every_layer), ropes=ropes)
    experts = reading.moe(config, "num_local_experts", renormalise=True)
    return reading.decoder(config, attention, [experts] * len(ropes), norm=reading.rms_norm(config, default=1e-5))


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *BLOCK_SPARSE_EXPERTS)
make = pre_norm
