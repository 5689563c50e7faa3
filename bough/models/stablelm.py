"""StableLM 1, 2 and Zephyr: layer norms, a quarter of each head rotated; the largest norms its heads and runs both
halves of a block in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts, NormFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS, in_layers
from bough.models.makers import parallel, pre_norm
from bough.weights.mapping import Mapping

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder


def read(config: Fields) -> ModelFacts:
    norm = reading.layer_norm(config, "layer_norm_eps")
    ropes = reading.same_rope(config, reading.head_dim(config), share=0.25)
    heads = None
    if config.flag("qk_layernorm"):
        heads = HeadNorms(norm=NormFacts(eps=norm.eps, kind="layer"), over="each head")
    attention = reading.gqa(config, ropes=ropes, qkv_bias=config.flag("use_qkv_bias"), head_norms=heads)
    norms = 1 if config.flag("use_parallel_residual") else 2
    return reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=norm, block_norms=norms)


def make(facts: ModelFacts, build: Build) -> Decoder:
    if Fields(facts.config).flag("use_parallel_residual"):
        return parallel(facts, build)
    return pre_norm(facts, build)


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *FEED_FORWARD,
    *in_layers(
        {f"self_attn.{side}_layernorm.norms.*": f"attn.{side}_norm.*" for side in ("q", "k")},
    ),
)
