"""Mellum 2: Qwen3-MoE with windows in the layers that the config names, each kind with rotary positions of its own."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models import qwen3_moe
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Outside


def read(config: Fields) -> ModelFacts:
    norm, width = reading.rms_norm(config), reading.head_dim(config, 128)
    windows = reading.windows(config, reading.no_layer, default=1024)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        width=width,
        windows=windows,
        ropes=reading.ropes_by_window(config, width, windows, theta=500_000.0, theta_local=10_000.0),
        head_norms=HeadNorms(norm=norm),
        qkv_bias=bias,
        out_bias=bias,
    )
    renormalise = config.flag("norm_topk_prob", default=True)
    experts = reading.moe(config, "num_experts", "num_local_experts", renormalise=renormalise)
    return reading.decoder(config, attention, reading.dense_first(config, experts), norm=norm)


WEIGHTS = Mapping(*qwen3_moe.WEIGHTS.rules, Outside("mtp."))
make = pre_norm
