"""VaultGemma: Gemma 2 without the norms after each half of a block."""

from __future__ import annotations

from dataclasses import replace

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import gemma2
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    return replace(gemma2.read(config), block_norms=2)


_NORMS = in_layers({"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "mlp_norm"})
WEIGHTS = Mapping(*ENDS, *_NORMS, *ATTENTION, *FEED_FORWARD)
make = pre_norm
