"""Gemma 3, text: five windowed layers to a global one, each kind with rotary positions of its own, heads normed before them.

Like Gemma 2 it norms before and after each half of a block, by 1 + weight.
"""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.gemma2 import softcap
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, SANDWICH_NORMS
from bough.models.makers import sandwich
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 256)
    norm = reading.rms_norm(config, offset=1.0)
    every = config.count("sliding_window_pattern", default=6)
    windows = reading.windows(config, lambda layer: (layer + 1) % every != 0, default=4096)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        width=width,
        windows=windows,
        ropes=reading.ropes_by_window(config, width, windows, theta=1_000_000.0, theta_local=10_000.0),
        scale=config.positive("query_pre_attn_scalar", default=256) ** -0.5,
        softcap=softcap(config, "attn_logit_softcapping", None),
        head_norms=HeadNorms(norm=norm),
        qkv_bias=bias,
        out_bias=bias,
    )
    return reading.decoder(
        config,
        attention,
        [reading.dense(config, activation_key="hidden_activation", default="gelu_pytorch_tanh")] * len(attention),
        norm=norm,
        block_norms=4,
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        embed_scale=config.count("hidden_size") ** 0.5,
        logit_softcap=softcap(config, "final_logit_softcapping", None),
    )


WEIGHTS = Mapping(*ENDS, *SANDWICH_NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD)
make = sandwich
