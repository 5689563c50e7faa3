"""Kimi-K2.5 and K2.6: Kimi K2, and a tower in which the frames of a short run of a video see one another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.kimi import read_kimi
from bough.config.model_facts import ModelFacts
from bough.models import deepseek
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.weights.mapping import Exact, Rename, Rule, Split

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    return replace(deepseek.read(config), tower=tower_of(config, read_kimi(config).tower()))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.kimi_tower import KimiTower

    return KimiTower(read_kimi(Fields(facts.config)), build)


TOWER: Final[tuple[Rule, ...]] = (
    Rename("patch_embed.proj", "tower.patches"),
    Exact("patch_embed.pos_emb.weight", "tower.positions.weight"),
    Rename("encoder.blocks.*.norm0", "tower.blocks.*.attn_norm"),
    Rename("encoder.blocks.*.norm1", "tower.blocks.*.mlp_norm"),
    Split("encoder.blocks.*.wqkv", "tower.blocks.*.attn.qkv", parts=("q", "k", "v")),
    Rename("encoder.blocks.*.wo", "tower.blocks.*.attn.out"),
    Rename("encoder.blocks.*.mlp.fc0", "tower.blocks.*.mlp.up"),
    Rename("encoder.blocks.*.mlp.fc1", "tower.blocks.*.mlp.down"),
    Rename("encoder.final_layernorm", "tower.post_norm"),
)
PROJECTOR: Final[tuple[Rule, ...]] = (
    Rename("pre_norm", "tower.merger.norm"),
    Rename("proj.*", "tower.merger.mlp.*"),
)
WEIGHTS = seeing_weights(deepseek.WEIGHTS, TOWER, ("vision_tower.",), (PROJECTOR, ("mm_projector.",)))
make = with_tower(deepseek.make, _tower)
