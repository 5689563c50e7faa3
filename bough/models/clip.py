"""CLIP: a causal text encoder whose last token counts, and a vision transformer whose class token does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.vit import clip_vit
from bough.models.dual_encoder import dual_weights, make_dual, read_text, with_image_tower
from bough.weights.mapping import Rename

if TYPE_CHECKING:
    from torch import nn

    from bough.layers.build import Build

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
    "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip


def read(config: Fields) -> ModelFacts:
    vit, width = clip_vit(config), config.count("projection_dim", default=512)
    facts = read_text(config, causal=True, defaults=_TEXT)
    return with_image_tower(facts, vit, width=width, pool=vit.block.hidden * width, patches=vit.tokens)


def make(facts: ModelFacts, build: Build) -> nn.Module:
    from bough.layers.image_embedder import ClassToken, ImageEmbedder
    from bough.layers.linear import ReplicatedLinear

    config = Fields(facts.config)
    vit, width = clip_vit(config), config.count("projection_dim", default=512)
    tower = ImageEmbedder(vit, ClassToken(vit.block.hidden, width, build), width, build)
    return make_dual(facts, build, ReplicatedLinear(facts.hidden, width, build), tower)


WEIGHTS = dual_weights(
    Rename("text_projection", "body.project"), Rename("visual_projection", "body.tower.pool.project")
)
