"""Mistral 4, text: attention over latents whose queries grow beyond the trained length, and experts chosen by a softmax."""

from __future__ import annotations

from dataclasses import replace

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Scored
from bough.models.deepseek import LATENTS
from bough.models.hf_names import ENDS, EXPERTS, FEED_FORWARD, NORMS, SHARED_EXPERTS
from bough.models.makers import pre_norm
from bough.models.ministral import growth
from bough.weights.mapping import Mapping, Stacked


def read(config: Fields) -> ModelFacts:
    reading.state_rope(config)
    groups, kept = config.count("n_group", default=1), config.count("topk_group", default=1)
    experts = reading.grouped_sigmoid(config, scored=Scored(by="softmax", groups=groups, kept_groups=kept))
    attention = [replace(each, temperature=growth(config)) for each in reading.mla(config)]
    return reading.decoder(config, attention, reading.dense_first(config, experts), norm=reading.rms_norm(config))


_EXPERTS = "model.layers.*.mlp.experts"
WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *LATENTS,
    *FEED_FORWARD,
    *EXPERTS,
    Stacked(f"{_EXPERTS}.gate_up_proj", "layers.*.mlp.experts", parts=("gate", "up")),
    Stacked(f"{_EXPERTS}.down_proj", "layers.*.mlp.experts", parts=("down",)),
    *SHARED_EXPERTS,
)
make = pre_norm
