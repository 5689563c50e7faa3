"""SigLIP, and SigLIP 2 over images of one size: a text encoder that sees padding, and a tower that a learned query
reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.tower_facts import attention_pool_parameters
from bough.config.vit import siglip_vit
from bough.models.dual_encoder import dual_weights, make_dual, read_text, with_image_tower
from bough.weights.mapping import Exact, Rename, Rule

if TYPE_CHECKING:
    from torch import nn

    from bough.layers.build import Build

TEXT: Final[dict[str, Any]] = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
HEAD: Final = Rename("text_model.head", "body.project")
POOL: Final[tuple[Rule, ...]] = (
    Exact("head.probe", "tower.pool.query.weight"),
    Exact("head.attention.in_proj_weight", "tower.pool.qkv_weight.weight"),
    Exact("head.attention.in_proj_bias", "tower.pool.qkv_bias.weight"),
    Rename("head.attention.out_proj", "tower.pool.out"),
    Rename("head.layernorm", "tower.pool.norm"),
    Rename("head.mlp.fc1", "tower.pool.mlp.up"),
    Rename("head.mlp.fc2", "tower.pool.mlp.down"),
)


def read(config: Fields) -> ModelFacts:
    vit = siglip_vit(config)
    facts = read_text(config, causal=False, defaults=TEXT)
    pool = attention_pool_parameters(vit.block)
    return with_image_tower(facts, vit, width=vit.block.hidden, pool=pool, patches=vit.tokens)


def make(facts: ModelFacts, build: Build) -> nn.Module:
    from bough.layers.image_embedder import AttentionPool, ImageEmbedder

    vit = siglip_vit(Fields(facts.config))
    width = vit.block.hidden
    tower = ImageEmbedder(vit, AttentionPool(vit.block, build), width, build)
    return make_dual(facts, build, text_head(facts, width, build), tower)


def text_head(facts: ModelFacts, width: int, build: Build) -> nn.Module:
    from bough.layers.linear import ReplicatedLinear

    return ReplicatedLinear(facts.hidden, width, build, bias=True)


WEIGHTS = dual_weights(HEAD, tower=POOL)
