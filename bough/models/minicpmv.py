"""MiniCPM-V 4.6: Qwen3.5 with slices of an image, sixteen patches a position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.minicpmv import read_minicpmv
from bough.config.model_facts import ModelFacts
from bough.models import qwen3_5
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.vit_vision import VIT
from bough.weights.mapping import Fuse, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    return replace(qwen3_5.read(config), tower=tower_of(config, read_minicpmv(config).tower()))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.minicpmv_tower import MiniCpmTower

    return MiniCpmTower(read_minicpmv(Fields(facts.config)), build)


WINDOWS: Final[tuple[Rule, ...]] = (
    Rename("layer_norm1", "tower.windows.attn_norm"),
    Fuse("tower.windows.attn.qkv", q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj"),
    Rename("self_attn.out_proj", "tower.windows.attn.out"),
    Rename("pre_norm", "tower.windows.norm"),
    Rename("linear_1", "tower.windows.up"),
    Rename("linear_2", "tower.windows.down"),
)
MERGER: Final[tuple[Rule, ...]] = (
    Rename("mlp.*.pre_norm", "tower.mergers.*.norm"),
    Rename("mlp.*.linear_1", "tower.mergers.*.mlp.0"),
    Rename("mlp.*.linear_2", "tower.mergers.*.mlp.2"),
)
WEIGHTS = seeing_weights(
    qwen3_5.WEIGHTS,
    VIT,
    ("model.vision_tower.",),
    (WINDOWS, ("model.vision_tower.vit_merger.",)),
    (MERGER, ("model.merger.",)),
)
make = with_tower(qwen3_5.make, _tower)
