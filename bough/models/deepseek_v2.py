"""DeepSeek V2 and V2-Lite, Coder V2: attention over latents, and experts chosen by a softmax, perhaps of the best groups."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Scored
from bough.models.deepseek import LATENTS
from bough.models.hf_names import ENDS, EXPERTS, FEED_FORWARD, NORMS, SHARED_EXPERTS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    method = config.word("topk_method", "greedy", "group_limited_greedy")
    scored = Scored(by="softmax")
    if method == "group_limited_greedy":
        groups, kept = config.count("n_group"), config.count("topk_group")
        scored = Scored(by="softmax", group_by="best", groups=groups, kept_groups=kept)
    experts = reading.grouped_sigmoid(config, scored=scored, renormalise=False)
    return reading.decoder(
        config, reading.mla(config), reading.dense_first(config, experts), norm=reading.rms_norm(config)
    )  # fmt: skip


WEIGHTS = Mapping(*ENDS, *NORMS, *LATENTS, *FEED_FORWARD, *EXPERTS, *SHARED_EXPERTS)
make = pre_norm
