"""MiMo-V2-Flash: values narrower than keys, windows of 128 tokens with sinks and twice the key-value heads in most layers,
experts chosen as DeepSeek V3 chooses them."""

from __future__ import annotations

from dataclasses import replace

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, ModelFacts
from bough.models.hf_names import ATTENTION, CHOICE_BIAS, ENDS, EXPERTS, FEED_FORWARD, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Mapping, Outside


def read(config: Fields) -> ModelFacts:
    if config.has("sliding_window_size"):  # as published: how many tokens before its own a query sees
        config = config.put(sliding_window=config.count("sliding_window_size") + 1)
    experts = reading.grouped_sigmoid(config, shared_intermediate=0)
    ffns = reading.dense_first(config, experts, default=1)
    return reading.decoder(config, _attention(config), ffns, norm=reading.rms_norm(config, default=1e-5))


def _attention(config: Fields) -> list[Gqa]:
    width = reading.head_dim(config, 192)
    windows = reading.windows(config, lambda layer: layer != 0 and (layer + 1) % 6 != 0, default=129)
    local = {"theta": 5_000_000.0, "theta_local": 10_000.0}
    same = reading.gqa(
        config,
        width=width,
        windows=windows,
        ropes=reading.ropes_by_window(config, width, windows, **local, share=0.334),
        v_dim=config.count("v_head_dim", default=128),
        value_scale=config.number(
            "attention_value_scale", default=1.0 if "attention_value_scale" in config.raw else 0.707
        ),
        qkv_bias=config.flag("attention_bias"),
    )
    return [
        each if each.window is None else replace(each, num_kv_heads=2 * each.num_kv_heads, sinks=True) for each in same
    ]


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *FEED_FORWARD,
    *EXPERTS,
    *CHOICE_BIAS,
    Exact("model.layers.*.self_attn.sinks", "layers.*.attn.sinks.weight"),
    Exact("model.layers.*.self_attn.attention_sink_bias", "layers.*.attn.sinks.weight"),
    Outside("model.mtp."),
)
make = pre_norm
