"""FlexOlmo: OLMo 2's block with experts in place of the feed-forward."""

from __future__ import annotations

from dataclasses import replace

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import olmo2
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, HEAD_NORMS, POST_NORMS
from bough.models.makers import post_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    ropes = reading.same_rope(config, reading.head_dim(config), theta=500_000.0)
    facts = olmo2.with_attention(config, (None,) * len(ropes), ropes, eps=1e-6)
    experts = reading.moe(config, "num_experts", renormalise=config.flag("norm_topk_prob"))
    return replace(facts, layers=tuple(replace(layer, ffn=experts) for layer in facts.layers))


WEIGHTS = Mapping(*ENDS, *POST_NORMS, *ATTENTION, *HEAD_NORMS, *EXPERTS)
make = post_norm
