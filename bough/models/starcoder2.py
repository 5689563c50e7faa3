"""StarCoder2: layer norms and biases everywhere, a feed-forward without gate."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    bias = config.flag("use_bias", default=True)
    ropes = reading.same_rope(config, reading.head_dim(config))
    windows = reading.windows(config, reading.every_layer)
    attention = reading.gqa(config, windows=windows, ropes=ropes, qkv_bias=bias, out_bias=bias)
    ffn = reading.dense(config, default="gelu_pytorch_tanh", gated=False, bias=bias)
    norm = reading.layer_norm(config, "norm_epsilon")
    tied = config.flag("tie_word_embeddings", default=True)
    return reading.decoder(config, attention, [ffn] * len(ropes), norm=norm, tie_embeddings=tied)


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *in_layers({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}))
make = pre_norm
