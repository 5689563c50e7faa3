"""GLM-4 of 2024 (`glm-4-9b-chat-hf`): half of each head is rotated, neighbouring values together; gate and up are one
tensor."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FUSED_FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields, block_norms: int = 2) -> ModelFacts:
    width = reading.head_dim(config, 128)
    ropes = reading.same_rope(config, width, share=0.5, interleaved=True)
    attention = reading.gqa(
        config, width=width, ropes=ropes, qkv_bias=config.flag("attention_bias", default=True)
    )  # fmt: skip
    norm = reading.rms_norm(config, default=1.5625e-07)
    return reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=norm, block_norms=block_norms)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FUSED_FEED_FORWARD)
make = pre_norm
