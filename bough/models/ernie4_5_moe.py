"""ERNIE 4.5 with experts: a learned bias decides which are chosen; some layers are dense."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Scored
from bough.core.errors import UnsupportedModel
from bough.models.ernie4_5 import attention_of
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, NORMS, SHARED_EXPERTS
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Mapping


def read(config: Fields) -> ModelFacts:
    if config.flag("use_bias"):
        raise UnsupportedModel(what="use_bias in a model with experts", why="no released checkpoint has such biases")
    attention = attention_of(config, config.count("hidden_size") // config.count("num_attention_heads"))
    count = len(attention)
    experts = reading.moe(
        config,
        "moe_num_experts",
        renormalise=True,
        scored=Scored(by="softmax", bias="row", least_sum=config.number("moe_norm_min", default=1e-12)),
        shared_intermediate=config.size("moe_num_shared_experts", default=0) * config.count("moe_intermediate_size"),
        shared_gated=False,
    )
    start, interval = config.size("moe_layer_start_index", default=1), config.count("moe_layer_interval", default=1)
    end = config.number("moe_layer_end_index", default=-1)
    end = count - 1 if end < 0 else end
    sparse = [start <= layer <= end and (layer + 1) % interval == 0 for layer in range(count)]
    dense = reading.dense(config)
    tied = config.flag("tie_word_embeddings", default=True)
    ffns = [experts if each else dense for each in sparse]
    return reading.decoder(config, attention, ffns, norm=reading.rms_norm(config, default=1e-5), tie_embeddings=tied)


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *FEED_FORWARD,
    *EXPERTS,
    *SHARED_EXPERTS,
    Exact("model.layers.*.mlp.moe_statics.e_score_correction_bias", "layers.*.mlp.choose.bias"),
)
make = pre_norm
