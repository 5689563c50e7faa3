"""InternVL 2.5, 3 and 3.5, by their own names and by those of transformers: tiles of an image, four patches a position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.model_facts import ModelFacts, NormFacts
from bough.config.vit import internvl_vit, ratio
from bough.models.makers import pre_norm
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import PROJECTORS, tiled, two_linears
from bough.weights.mapping import Exact, Fuse, Rename, Rule, Split

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower

_PROJECTOR_NORM: Final = NormFacts(eps=1e-5, kind="layer", bias=True)


def read(config: Fields) -> ModelFacts:
    facts, vit, by = read_inside(config), internvl_vit(config), ratio(config)
    projector = two_linears(vit.block.hidden * by * by, facts.hidden, norm=True)
    tiles = processor_fields(config).count("max_patches", default=12)
    positions = (vit.side // by) ** 2
    tower = tiled(vit, width=facts.hidden, projector=projector, positions=positions, tiles=tiles + 1, video=True)
    return replace(facts, tower=tower_of(config, tower))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.layers.projectors import TwoLinears
    from bough.layers.tower import alone
    from bough.layers.vit import TiledTower

    config = Fields(facts.config)
    vit = internvl_vit(config)
    project = TwoLinears(
        (vit.block.hidden, facts.hidden),
        alone(build),
        activation=config.choice(reading.ACTIVATIONS, "projector_hidden_act", default="gelu"),
        norm=_PROJECTOR_NORM,
        side=vit.side,
        by=ratio(config),
    )
    return TiledTower(vit, project, facts.hidden, build)


TOWER: Final[tuple[Rule, ...]] = (
    Rename("embeddings.patch_embeddings.projection", "tower.vit.patches"),
    Exact("embeddings.position_embeddings", "tower.vit.positions.weight"),
    Exact("embeddings.cls_token", "tower.vit.class_token.weight"),
    Rename("layernorm", "tower.vit.post_norm"),
    Rename("encoder.layer.*.layernorm_before", "tower.vit.blocks.*.attn_norm"),
    Rename("encoder.layer.*.layernorm_after", "tower.vit.blocks.*.mlp_norm"),
    Exact("encoder.layer.*.lambda_1", "tower.vit.blocks.*.attn_scale.weight"),
    Exact("encoder.layer.*.lambda_2", "tower.vit.blocks.*.mlp_scale.weight"),
    Fuse(
        "tower.vit.blocks.*.attn.qkv",
        q="encoder.layer.*.attention.q_proj",
        k="encoder.layer.*.attention.k_proj",
        v="encoder.layer.*.attention.v_proj",
    ),
    Rename("encoder.layer.*.attention.projection_layer", "tower.vit.blocks.*.attn.out"),
    Rename("encoder.layer.*.mlp.fc1", "tower.vit.blocks.*.mlp.up"),
    Rename("encoder.layer.*.mlp.fc2", "tower.vit.blocks.*.mlp.down"),
)
OWN_TOWER: Final[tuple[Rule, ...]] = (
    Rename("embeddings.patch_embedding", "tower.vit.patches"),
    Exact("embeddings.position_embedding", "tower.vit.positions.weight"),
    Exact("embeddings.class_embedding", "tower.vit.class_token.weight"),
    Rename("encoder.layers.*.norm1", "tower.vit.blocks.*.attn_norm"),
    Rename("encoder.layers.*.norm2", "tower.vit.blocks.*.mlp_norm"),
    Exact("encoder.layers.*.ls1", "tower.vit.blocks.*.attn_scale.weight"),
    Exact("encoder.layers.*.ls2", "tower.vit.blocks.*.mlp_scale.weight"),
    Split("encoder.layers.*.attn.qkv", "tower.vit.blocks.*.attn.qkv", parts=("q", "k", "v")),
    Rename("encoder.layers.*.attn.proj", "tower.vit.blocks.*.attn.out"),
    Rename("encoder.layers.*.mlp.fc1", "tower.vit.blocks.*.mlp.up"),
    Rename("encoder.layers.*.mlp.fc2", "tower.vit.blocks.*.mlp.down"),
)
"""By the names of InternVL's own checkpoints."""
OWN_PROJECTOR: Final[tuple[Rule, ...]] = (Rename("mlp1.*", "tower.project.mlp.*"),)
PROJECTOR: Final[tuple[Rule, ...]] = (
    Rename("layer_norm", "tower.project.mlp.0"),
    Rename("linear_1", "tower.project.mlp.1"),
    Rename("linear_2", "tower.project.mlp.3"),
)
WEIGHTS = seeing_weights(
    TEXT,
    TOWER,
    ("vision_tower.", "model.vision_tower."),
    (PROJECTOR, PROJECTORS),
    (OWN_TOWER, ("vision_model.",)),
    (OWN_PROJECTOR, ("",)),
)
make = with_tower(pre_norm, _tower)
