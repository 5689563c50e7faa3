"""Jamba: Mamba in most layers and attention without positions in a few, with experts in every other layer."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import FeedForward, Mixer, ModelFacts
from bough.config.state_reading import mamba
from bough.models.hf_names import ATTENTION, ENDS, JAMBA_BLOCK, in_layers, mamba as mamba_names
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    norm, count = reading.rms_norm(config), reading.num_layers(config)
    state = mamba(config, bias=config.flag("mamba_proj_bias"), norm_eps=norm.eps)
    attention = reading.gqa(config, ropes=(None,) * count)[0]
    mixers: list[Mixer] = [attention if each else state for each in _every(config, "attn", 8, 4)]
    ffns: list[FeedForward] = [reading.dense(config)] * count
    if config.count("num_experts", default=16) > 1:
        experts = reading.moe(config, "num_experts", renormalise=False)
        ffns = [experts if each else dense for each, dense in zip(_every(config, "expert", 2, 1), ffns, strict=True)]
    return reading.decoder(config, mixers, ffns, norm=norm)


def _every(config: Fields, what: str, period: int, offset: int) -> list[bool]:
    """By layer: whether it is one of those that come once in a period."""
    period = config.count(f"{what}_layer_period", default=period)
    offset = config.size(f"{what}_layer_offset", default=offset)
    return [layer % period == offset for layer in range(reading.num_layers(config))]


WEIGHTS = Mapping(
    *ENDS,
    *JAMBA_BLOCK,
    *ATTENTION,
    *mamba_names("model.layers.*.mamba", "layers.*.attn"),
    *in_layers(
        {
            "feed_forward.router": "mlp.router",
            "feed_forward.experts.*.gate_proj": "mlp.experts.*.gate",
            "feed_forward.experts.*.up_proj": "mlp.experts.*.up",
            "feed_forward.experts.*.down_proj": "mlp.experts.*.down",
        }
    ),
)
make = pre_norm
