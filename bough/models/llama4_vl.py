"""Llama 4 Scout and Maverick: tiles of an image and the whole image, four patches a position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.model_facts import ModelFacts
from bough.config.vit import llama4_vit, shuffled_by
from bough.models import llama4
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.vit_vision import tiled
from bough.weights.mapping import Exact, Fuse, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def _inner(config: Fields) -> int:
    """Width between the products of the projector."""
    return config.inner("vision_config").count("projector_output_dim", default=4096)


def read(config: Fields) -> ModelFacts:
    facts, vit, by = llama4.read(config), llama4_vit(config), shuffled_by(config)
    inner = _inner(config)
    projector = vit.block.hidden * by * by * inner + inner * inner + inner * facts.hidden
    tiles = processor_fields(config).count("max_patches", default=16) + 1
    tower = tiled(vit, width=facts.hidden, projector=projector, positions=(vit.side // by) ** 2, tiles=tiles)
    return replace(facts, tower=tower_of(config, tower))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.layers.projectors import ThreeLinears
    from bough.layers.tower import alone
    from bough.layers.vit import TiledTower

    config = Fields(facts.config)
    vit = llama4_vit(config)
    widths = (vit.block.hidden, _inner(config), facts.hidden)
    project = ThreeLinears(widths, alone(build), side=vit.side, by=shuffled_by(config))
    return TiledTower(vit, project, facts.hidden, build)


TOWER: Final[tuple[Rule, ...]] = (
    Rename("patch_embedding.linear", "tower.vit.patches"),
    Exact("class_embedding", "tower.vit.class_token.weight"),
    Exact("positional_embedding_vlm", "tower.vit.positions.weight"),
    Rename("layernorm_pre", "tower.vit.pre_norm"),
    Rename("layernorm_post", "tower.vit.post_norm"),
    Rename("model.layers.*.input_layernorm", "tower.vit.blocks.*.attn_norm"),
    Rename("model.layers.*.post_attention_layernorm", "tower.vit.blocks.*.mlp_norm"),
    Fuse(
        "tower.vit.blocks.*.attn.qkv",
        q="model.layers.*.self_attn.q_proj",
        k="model.layers.*.self_attn.k_proj",
        v="model.layers.*.self_attn.v_proj",
    ),
    Rename("model.layers.*.self_attn.o_proj", "tower.vit.blocks.*.attn.out"),
    Rename("model.layers.*.mlp.fc1", "tower.vit.blocks.*.mlp.up"),
    Rename("model.layers.*.mlp.fc2", "tower.vit.blocks.*.mlp.down"),
    Rename("vision_adapter.mlp.fc1", "tower.project.first"),
    Rename("vision_adapter.mlp.fc2", "tower.project.second"),
)
LAST: Final[tuple[Rule, ...]] = (Rename("multi_modal_projector.linear_1", "tower.project.third"),)
WEIGHTS = seeing_weights(llama4.WEIGHTS, TOWER, ("vision_model.", "model.vision_model."), (LAST, ("", "model.")))
make = with_tower(llama4.make, _tower)
