"""Towers of CLIP's and SigLIP's kind, as configs describe them, and the names of their tensors."""

from __future__ import annotations

from typing import Final

from bough.config.media_facts import TowerFacts
from bough.config.tower_facts import VitFacts
from bough.weights.mapping import Exact, Fuse, Outside, Rename, Rule


def tiled(
    facts: VitFacts,
    *,
    width: int,
    projector: int,
    positions: int,
    tiles: int,
    atomic: bool = False,
    video: bool = False,
) -> TowerFacts:
    """What planning needs to know. `projector`: its parameters; `positions`: of a tile; `tiles`: of an image, at most;
    `video`: whether it sees frames of videos."""
    return TowerFacts(
        kinds=("image", "video") if video else ("image",),
        num_parameters=facts.num_parameters() + projector,
        width=width,
        tokens_per_position=max(1, -(-facts.tokens // positions)),
        values_per_token=facts.values_per_token,
        max_positions=positions * tiles,
        atomic=atomic,
    )


def two_linears(inner: int, width: int, *, bias: bool = True, norm: bool = False) -> int:
    """Parameters of `layers.projectors.TwoLinears`. `inner`: what its first product takes."""
    biases = 2 * width if bias else 0
    return inner * width + width * width + biases + (2 * inner if norm else 0)


VIT: Final[tuple[Rule, ...]] = (
    Rename("embeddings.patch_embedding", "tower.vit.patches"),
    Exact("embeddings.position_embedding.weight", "tower.vit.positions.weight"),
    Exact("embeddings.class_embedding", "tower.vit.class_token.weight"),
    Rename("pre_layrnorm", "tower.vit.pre_norm"),
    Rename("post_layernorm", "tower.vit.post_norm"),
    Rename("encoder.layers.*.layer_norm1", "tower.vit.blocks.*.attn_norm"),
    Rename("encoder.layers.*.layer_norm2", "tower.vit.blocks.*.mlp_norm"),
    Fuse(
        "tower.vit.blocks.*.attn.qkv",
        q="encoder.layers.*.self_attn.q_proj",
        k="encoder.layers.*.self_attn.k_proj",
        v="encoder.layers.*.self_attn.v_proj",
    ),
    Rename("encoder.layers.*.self_attn.out_proj", "tower.vit.blocks.*.attn.out"),
    Rename("encoder.layers.*.mlp.fc1", "tower.vit.blocks.*.mlp.up"),
    Rename("encoder.layers.*.mlp.fc2", "tower.vit.blocks.*.mlp.down"),
    Outside("head."),
    Outside("embeddings.position_ids"),
)
"""Names below the tower."""
TOWERS: Final = (
    "vision_tower.vision_model.",
    "model.vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.",
)
PROJECTORS: Final = ("multi_modal_projector.", "model.multi_modal_projector.")
