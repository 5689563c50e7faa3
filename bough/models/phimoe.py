"""Phi-3.5-MoE: layer norms, and two experts per token, each weighed among those that come close to it."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Scored
from bough.core.errors import UnsupportedModel
from bough.models.hf_names import ATTENTION, BLOCK_SPARSE_EXPERTS, ENDS, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, reading.head_dim(config), theta=1_000_000.0)
    windows = reading.windows(config, reading.every_layer)
    attention = reading.gqa(config, windows=windows, ropes=ropes, qkv_bias=bias, out_bias=bias)
    margin = 2 * config.number("router_jitter_noise", default=0.01)
    experts = reading.moe(
        config, "num_local_experts", renormalise=False, scored=Scored(by="sparsemixer", margin=margin)
    )  # fmt: skip
    if experts.experts_per_token != 2:
        raise UnsupportedModel(what=f"{experts.experts_per_token} experts per token", why="this router picks two")
    norm = reading.layer_norm(config, "rms_norm_eps")
    ffns = [experts] * len(ropes)
    return reading.decoder(config, attention, ffns, norm=norm, head_bias=config.flag("lm_head_bias"))


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *BLOCK_SPARSE_EXPERTS)
make = pre_norm
