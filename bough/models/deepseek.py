"""DeepSeek V3, R1, V3.1 and Kimi K2: attention over latents, and experts chosen by groups, scores and a bias.

The layer behind the last, which drafts, is left out.
"""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import FeedForward, ModelFacts
from bough.models.hf_names import CHOICE_BIAS, ENDS, EXPERTS, FEED_FORWARD, NORMS, SHARED_EXPERTS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Beyond, Fuse, Mapping

BESIDE_QUERIES = (
    Fuse(
        "layers.*.attn.down",
        q="model.layers.*.self_attn.q_a_proj",
        kv="model.layers.*.self_attn.kv_a_proj_with_mqa",
    ),
    *in_layers(
        {
            "self_attn.q_a_layernorm": "attn.q_norm",
            "self_attn.q_b_proj": "attn.q_up",
            "self_attn.kv_a_layernorm": "attn.kv_norm",
            "self_attn.kv_b_proj": "attn.kv_up",
            "self_attn.o_proj": "attn.out",
        }
    ),
)
LATENTS = (*in_layers({"self_attn.q_proj": "attn.q_up"}), *BESIDE_QUERIES)


def feed_forwards(config: Fields) -> list[FeedForward]:
    groups = {"n_group": config.count("n_group", default=8), "topk_group": config.count("topk_group", default=4)}
    scale = config.number("routed_scaling_factor", default=2.5)
    experts = reading.grouped_sigmoid(config.put(**groups), scale=scale)
    return reading.dense_first(config, experts, default=3)


def read(config: Fields) -> ModelFacts:
    return reading.decoder(config, reading.mla(config), feed_forwards(config), norm=reading.rms_norm(config))


WEIGHTS = Mapping(
    *ENDS, *NORMS, *LATENTS, *FEED_FORWARD, *EXPERTS, *CHOICE_BIAS, *SHARED_EXPERTS, Beyond("model.layers")
)
make = pre_norm
