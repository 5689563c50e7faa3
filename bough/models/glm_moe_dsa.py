"""GLM-5: DeepSeek V3.2's sparse attention, in which a layer may share the choice of the one before it."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.deepseek_v32 import WEIGHTS, make

__all__ = ["WEIGHTS", "make", "read"]


def read(config: Fields) -> ModelFacts:
    mixers = reading.mla(config, eps=1e-5)
    mixers = reading.sparse(config, mixers, _indexers(config, len(mixers)), heads=32, interleaved=True)
    experts = reading.grouped_sigmoid(config, scale=config.number("routed_scaling_factor", default=2.5))
    ffns = reading.dense_first(config, experts, default=3)
    return reading.decoder(config, mixers, ffns, norm=reading.rms_norm(config, default=1e-5))


def _indexers(config: Fields, num_layers: int) -> list[bool]:
    """By layer, whether it has an indexer: as listed, as a word of F and S, or every so often from a layer on."""
    kinds = config.words("indexer_types", ("full", "shared"), num_layers)
    pattern = config.any("index_topk_pattern")
    if kinds is None and isinstance(pattern, str):
        spelled = config.put(index_topk_pattern=list(pattern)).words("index_topk_pattern", ("F", "S"), num_layers)
        return [each == "F" for each in spelled or ()]
    if kinds is None and pattern is not None:
        kinds = config.words("index_topk_pattern", ("full", "shared"), num_layers)
    if kinds is not None:
        return [each == "full" for each in kinds]
    every, first = config.count("index_topk_freq", default=1), config.size("index_skip_topk_offset", default=2)
    return [max(layer - first + 1, 0) % every == 0 for layer in range(num_layers)]
