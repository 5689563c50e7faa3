"""DeepSeek V3.2: V3 whose queries read 2,048 tokens at most, those that an indexer in each layer scores best."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import deepseek
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping

INDEXER = in_layers(
    {
        "self_attn.indexer.wq_b": "attn.indexer.queries",
        "self_attn.indexer.wk": "attn.indexer.keys",
        "self_attn.indexer.k_norm": "attn.indexer.key_norm",
        "self_attn.indexer.weights_proj": "attn.indexer.weigh",
    }
)


def read(config: Fields) -> ModelFacts:
    mixers = reading.mla(config)
    every_layer = [True] * len(mixers)
    mixers = reading.sparse(config, mixers, every_layer, heads=64, interleaved=False)
    return reading.decoder(config, mixers, deepseek.feed_forwards(config), norm=reading.rms_norm(config))


WEIGHTS = Mapping(*deepseek.WEIGHTS.rules, *INDEXER)
make = pre_norm
