"""Command-R and R+: both halves of a block read one norm; neighbouring values of a head are rotated together."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, NORMS
from bough.models.makers import parallel
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    ropes = reading.same_rope(config, reading.head_dim(config), theta=500_000.0, interleaved=True)
    norm = reading.layer_norm(config, "layer_norm_eps", bias=False)
    bias = config.flag("attention_bias")
    heads = HeadNorms(norm=norm, over="each head") if config.flag("use_qk_norm") else None
    return with_attention(config, reading.gqa(config, ropes=ropes, head_norms=heads, qkv_bias=bias, out_bias=bias))


def with_attention(config: Fields, attention: list[Gqa]) -> ModelFacts:
    return reading.decoder(
        config,
        attention,
        [reading.dense(config)] * len(attention),
        norm=reading.layer_norm(config, "layer_norm_eps", bias=False),
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        block_norms=1,
        logit_scale=config.number("logit_scale", default=0.0625),
    )


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD)
make = parallel
