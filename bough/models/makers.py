"""`make` of the models whose blocks are shared. Torch is imported when a model is made: reading a config needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bough.config.model_facts import ModelFacts

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder

Make = Callable[[ModelFacts, "Build"], "Decoder"]


def _decoder_of(block: str) -> Make:
    """Makes a decoder of the blocks of this name in `layers/blocks.py`."""

    def make(facts: ModelFacts, build: Build) -> Decoder:
        from bough.layers import blocks
        from bough.layers.decoder import Decoder

        return Decoder(facts, build, vars(blocks)[block])

    return make


pre_norm = _decoder_of("PreNormBlock")
sandwich = _decoder_of("SandwichBlock")
post_norm = _decoder_of("PostNormBlock")
parallel = _decoder_of("ParallelBlock")
two_norm_parallel = _decoder_of("TwoNormParallelBlock")
after_norm = _decoder_of("AfterNormBlock")
one_part = _decoder_of("OnePartBlock")
