"""Solar Open: Llama's attention and experts in every layer, chosen as DeepSeek V3 chooses them."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, CHOICE_BIAS, ENDS, EXPERTS, NORMS, SHARED_EXPERTS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 128)
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width, theta=1_000_000.0),
        qkv_bias=config.flag("attention_bias"),
    )
    experts = reading.grouped_sigmoid(config)
    return reading.decoder(
        config, attention, [experts] * len(attention), norm=reading.rms_norm(config, default=1e-5)
    )  # fmt: skip


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *EXPERTS, *CHOICE_BIAS, *SHARED_EXPERTS)
make = pre_norm
