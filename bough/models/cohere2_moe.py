"""Command A+: Command A's block, in which all layers but perhaps the first have experts beside shared ones."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import FeedForward, ModelFacts, Scored
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, NORMS, SHARED_EXPERTS
from bough.models.makers import parallel
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 128)
    first = config.size("first_k_dense_replace", default=0)
    early = config.count("prefix_dense_sliding_window_pattern", default=1)
    every = config.count("sliding_window_pattern", default=4)
    windows = reading.windows(
        config,
        lambda layer: (layer + 1) % early != 0 if layer < first else (layer - first + 1) % every != 0,
        default=4096,
    )
    ropes = reading.same_rope(config, width, interleaved=True)
    sparse = reading.sparse_layers(config)
    ropes = tuple(
        rope if window is not None or (early == 1 and not sparse[layer]) else None
        for layer, (window, rope) in enumerate(zip(windows, ropes, strict=True))
    )
    bias = config.flag("attention_bias")
    return reading.decoder(
        config,
        reading.gqa(config, width=width, windows=windows, ropes=ropes, qkv_bias=bias, out_bias=bias),
        _feed_forward(config, sparse),
        norm=reading.rms_norm(config)
        if config.has("rms_norm_eps")
        else reading.layer_norm(config, "layer_norm_eps", bias=False),
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        block_norms=1,
        logit_scale=config.number("logit_scale", default=0.0625),
    )


def _feed_forward(config: Fields, sparse: list[bool]) -> list[FeedForward]:
    by = config.word("expert_selection_fn", "softmax", "sigmoid")
    how = config.word("shared_expert_combination_strategy", "average", "sum")
    shared = config.size("num_shared_experts", default=0)
    part = 0.5 if shared and how == "average" else 1.0
    experts = reading.moe(
        config,
        "num_experts",
        renormalise=by == "softmax" or config.flag("norm_topk_prob", default=True),
        scored=Scored() if by == "sigmoid" else None,
        scale=part,
        shared_intermediate=shared * config.count("intermediate_size"),
        shared_gated=False,
        shared_scale=part,
    )
    early = config.count("prefix_dense_intermediate_size", default=config.count("intermediate_size"))
    dense = reading.dense(config.put(intermediate_size=early))
    return [experts if each else dense for each in sparse]


WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD, *EXPERTS, *SHARED_EXPERTS)
make = parallel
