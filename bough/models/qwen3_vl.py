"""Qwen3-VL: Qwen3 with positions of three axes that take turns, and a tower whose features enter several layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, HeadNorms, ModelFacts
from bough.models import qwen3
from bough.models.makers import pre_norm
from bough.models.qwen2_vl import ATTENTION, PREFIXES
from bough.models.qwen_vision import read_vision
from bough.models.seeing import deepstacked, seeing_weights, tower_of, with_tower
from bough.weights.mapping import Exact, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower

SECTIONS = (24, 20, 20)


def read(config: Fields) -> ModelFacts:
    attention = read_attention(config)
    facts = reading.decoder(config, attention, [reading.dense(config)] * len(attention), norm=reading.rms_norm(config))
    return seeing(facts, config)


def read_attention(config: Fields) -> list[Gqa]:
    width = reading.head_dim(config, 128)
    bias = config.flag("attention_bias")
    ropes = reading.same_rope(
        config, width, theta=500_000.0, kinds={"mrope": "default"}, sections=SECTIONS, sections_take_turns=True
    )
    norms = HeadNorms(norm=reading.rms_norm(config))
    return reading.gqa(config, width=width, ropes=ropes, head_norms=norms, qkv_bias=bias, out_bias=bias)


def seeing(facts: ModelFacts, config: Fields) -> ModelFacts:
    """The facts with those of the tower."""
    vision = read_vision(config, "3")
    return replace(deepstacked(facts, len(vision.deep)), tower=tower_of(config, vision.tower()))


def make_tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.qwen_tower import QwenTower

    return QwenTower(read_vision(Fields(facts.config), "3"), build)


BLOCKS: tuple[Rule, ...] = (
    *ATTENTION,
    Rename("blocks.*.mlp.linear_fc1", "tower.blocks.*.mlp.up"),
    Rename("blocks.*.mlp.linear_fc2", "tower.blocks.*.mlp.down"),
    Exact("pos_embed.weight", "tower.positions.weight"),
)
TOWER: tuple[Rule, ...] = (
    *BLOCKS,
    Rename("merger.norm", "tower.merger.norm"),
    Rename("merger.linear_fc1", "tower.merger.mlp.0"),
    Rename("merger.linear_fc2", "tower.merger.mlp.2"),
    Rename("deepstack_merger_list.*.norm", "tower.deep_mergers.*.norm"),
    Rename("deepstack_merger_list.*.linear_fc1", "tower.deep_mergers.*.mlp.0"),
    Rename("deepstack_merger_list.*.linear_fc2", "tower.deep_mergers.*.mlp.2"),
)
WEIGHTS = seeing_weights(qwen3.WEIGHTS, TOWER, PREFIXES)
make = with_tower(pre_norm, make_tower)
