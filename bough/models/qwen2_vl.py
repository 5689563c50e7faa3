"""Qwen2-VL: Qwen2 with positions of three axes, and a vision transformer over images of their own shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import qwen2
from bough.models.makers import pre_norm
from bough.models.qwen_vision import read_vision
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.weights.mapping import Rename, Rule, Split

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower

SECTIONS = (16, 24, 24)
"""Frequencies of a head that turn by time, height and width, where the config does not say."""


def read(config: Fields) -> ModelFacts:
    return replace(read_text(config), tower=tower_of(config, read_vision(config, "2").tower()))


def read_text(config: Fields) -> ModelFacts:
    """Qwen2 with positions of three axes."""
    ropes = reading.same_rope(
        config, reading.head_dim(config), theta=1_000_000.0, kinds={"mrope": "default"}, sections=SECTIONS
    )
    attention = reading.gqa(config, windows=qwen2.windows_from(config), ropes=ropes, qkv_bias=True)
    return reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=reading.rms_norm(config))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.qwen_tower import QwenTower

    return QwenTower(read_vision(Fields(facts.config), "2"), build)


MERGER: tuple[Rule, ...] = (
    Rename("merger.ln_q", "tower.merger.norm"),
    Rename("merger.mlp.*", "tower.merger.mlp.*"),
)
ATTENTION: tuple[Rule, ...] = (
    Rename("patch_embed.proj", "tower.patches"),
    Rename("blocks.*.norm1", "tower.blocks.*.attn_norm"),
    Rename("blocks.*.norm2", "tower.blocks.*.mlp_norm"),
    Split("blocks.*.attn.qkv", "tower.blocks.*.attn.qkv", parts=("q", "k", "v")),
    Rename("blocks.*.attn.proj", "tower.blocks.*.attn.out"),
)
PREFIXES = ("visual.", "model.visual.")
WEIGHTS = seeing_weights(
    qwen2.WEIGHTS,
    (
        *ATTENTION,
        *MERGER,
        Rename("blocks.*.mlp.fc1", "tower.blocks.*.mlp.up"),
        Rename("blocks.*.mlp.fc2", "tower.blocks.*.mlp.down"),
    ),
    PREFIXES,
)
make = with_tower(pre_norm, _tower)
