"""Bamba: Mamba 2 in most layers and attention in a few, each followed by a dense block."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Mixer, ModelFacts
from bough.config.state_reading import mamba2
from bough.models.hf_names import ATTENTION, ENDS, JAMBA_BLOCK, mamba2 as mamba2_names
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width, bias = reading.head_dim(config), config.flag("attention_bias")
    norm = reading.rms_norm(config, default=1e-5)
    # Half of a head is rotated, whatever the config says.
    ropes = reading.same_rope(config, width, rotary_dim=width // 2)
    attention = reading.gqa(config, width=width, ropes=ropes, qkv_bias=bias, out_bias=bias)
    bias = config.flag("mamba_proj_bias")
    state = mamba2(config, norm_eps=norm.eps, in_bias=bias, out_bias=bias)
    attends = config.sizes("attn_layer_indices") or ()
    mixers: list[Mixer] = [each if layer in attends else state for layer, each in enumerate(attention)]
    ffn = reading.dense(config, bias=config.flag("mlp_bias"))
    return reading.decoder(config, mixers, [ffn] * len(mixers), norm=norm)


WEIGHTS = Mapping(*ENDS, *JAMBA_BLOCK, *ATTENTION, *mamba2_names("model.layers.*.mamba", "layers.*.attn"))
make = pre_norm
