"""Apertus: normed heads, and a feed-forward without gate whose activation (xIELU) is learned."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, HEAD_NORMS, UNGATED, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    norm = reading.rms_norm(config, default=1e-5)
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(config, reading.head_dim(config), theta=12_000_000.0, stated=True)
    attention = reading.gqa(config, ropes=ropes, head_norms=HeadNorms(norm=norm), qkv_bias=bias, out_bias=bias)
    ffn = reading.dense(config, default="xielu", gated=False, bias=config.flag("mlp_bias"))
    return reading.decoder(config, attention, [ffn] * len(ropes), norm=norm)


NORMS = in_layers({"attention_layernorm": "attn_norm", "feedforward_layernorm": "mlp_norm"})
WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *UNGATED, *in_layers({"mlp.act_fn": "mlp.activation"}))
make = pre_norm
