"""GLM-4 and GLM-Z1 of 2025 (0414): the earlier GLM-4 with norms after each half of a block as well."""

from __future__ import annotations

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import glm
from bough.models.hf_names import ATTENTION, ENDS, FUSED_FEED_FORWARD, in_layers
from bough.models.makers import sandwich
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    return glm.read(config, block_norms=4)


WEIGHTS = Mapping(
    *ENDS,
    *in_layers(
        {
            "input_layernorm": "attn_norm",
            "post_self_attn_layernorm": "after_attn_norm",
            "post_attention_layernorm": "mlp_norm",
            "post_mlp_layernorm": "after_mlp_norm",
        }
    ),
    *ATTENTION,
    *FUSED_FEED_FORWARD,
)
make = sandwich
