"""Qwen3-Omni's thinker: Qwen3-VL-MoE, with an encoder of sounds beside its tower."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.omni import read_omni_hearing
from bough.models.makers import pre_norm
from bough.models.omni import CONVOLUTIONS, ENCODER, make_omni_tower, omni_weights
from bough.models.qwen2_moe import sparse_layers
from bough.models.qwen2_vl import MERGER
from bough.models.qwen3_vl import BLOCKS, read_attention, seeing
from bough.models.qwen3_vl_moe import TEXT
from bough.models.seeing import with_tower
from bough.weights.mapping import Rename, Rule


def read(config: Fields) -> ModelFacts:
    renormalise = config.flag("norm_topk_prob", default=True)
    experts = reading.moe(config, "num_experts", "num_local_experts", renormalise=renormalise)
    norm, attention = reading.rms_norm(config), read_attention(config)
    facts = seeing(reading.decoder(config, attention, sparse_layers(config, experts), norm=norm), config)
    if facts.tower is None:
        return facts
    return replace(facts, tower=read_omni_hearing(config, "3").beside(facts.tower))


_VISION: Final[tuple[Rule, ...]] = (
    *BLOCKS,
    *MERGER,
    Rename("merger_list.*.ln_q", "tower.deep_mergers.*.norm"),
    Rename("merger_list.*.mlp.*", "tower.deep_mergers.*.mlp.*"),
)
_AUDIO: Final[tuple[Rule, ...]] = (
    *ENCODER,
    *CONVOLUTIONS,
    Rename("proj1", "tower.before"),
    Rename("proj2", "tower.project"),
)
WEIGHTS = omni_weights(TEXT, _VISION, _AUDIO)
make = with_tower(pre_norm, partial(make_omni_tower, kind="3"))
