"""SigLIP 2 over images of their own shapes (NaFlex): SigLIP with learned positions that are resized to each image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.tower_facts import attention_pool_parameters
from bough.config.vit import siglip2_naflex
from bough.models.dual_encoder import dual_weights, make_dual, read_text, with_image_tower
from bough.models.siglip import HEAD, POOL, TEXT, text_head

if TYPE_CHECKING:
    from torch import nn

    from bough.layers.build import Build


def read(config: Fields) -> ModelFacts:
    tower = siglip2_naflex(config)
    facts = read_text(config, causal=False, defaults=TEXT)
    pool = attention_pool_parameters(tower.block)
    return with_image_tower(facts, tower, width=tower.block.hidden, pool=pool, patches=tower.most_patches)


def make(facts: ModelFacts, build: Build) -> nn.Module:
    from bough.layers.image_embedder import NaflexEmbedder

    tower = siglip2_naflex(Fields(facts.config))
    return make_dual(facts, build, text_head(facts, tower.block.hidden, build), NaflexEmbedder(tower, build))


WEIGHTS = dual_weights(HEAD, tower=POOL)
