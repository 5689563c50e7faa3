"""DeepSeek-OCR 2: DeepSeek MoE with tiles of an image and the whole image, which learned queries read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.deepseek_ocr2 import read_ocr2
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models import deepseek_v1
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.weights.mapping import Exact, Fuse, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    return replace(deepseek_v1.read(config), tower=tower_of(config, read_ocr2(config).tower()))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.deepseek_ocr2_tower import Ocr2Tower

    return Ocr2Tower(read_ocr2(Fields(facts.config)), build)


SAM: Final[tuple[Rule, ...]] = (
    Rename("patch_embed.proj", "tower.sam.patches"),
    Exact("pos_embed", "tower.sam.positions.weight"),
    Rename("blocks.*.norm1", "tower.sam.blocks.*.attn_norm"),
    Rename("blocks.*.norm2", "tower.sam.blocks.*.mlp_norm"),
    Rename("blocks.*.attn.qkv", "tower.sam.blocks.*.attn.qkv"),
    Rename("blocks.*.attn.proj", "tower.sam.blocks.*.attn.out"),
    Exact("blocks.*.attn.rel_pos_h", "tower.sam.blocks.*.attn.rows.weight"),
    Exact("blocks.*.attn.rel_pos_w", "tower.sam.blocks.*.attn.columns.weight"),
    Rename("blocks.*.mlp.lin1", "tower.sam.blocks.*.mlp.up"),
    Rename("blocks.*.mlp.lin2", "tower.sam.blocks.*.mlp.down"),
    Rename("neck.*", "tower.sam.neck.*"),
    Rename("net_2", "tower.sam.shrink_first"),
    Rename("net_3", "tower.sam.shrink_last"),
)
QUERIES: Final[tuple[Rule, ...]] = (
    Rename("model.model.layers.*.input_layernorm", "tower.queries.blocks.*.attn_norm"),
    Rename("model.model.layers.*.post_attention_layernorm", "tower.queries.blocks.*.mlp_norm"),
    Fuse(
        "tower.queries.blocks.*.qkv",
        q="model.model.layers.*.self_attn.q_proj",
        k="model.model.layers.*.self_attn.k_proj",
        v="model.model.layers.*.self_attn.v_proj",
    ),
    Rename("model.model.layers.*.self_attn.o_proj", "tower.queries.blocks.*.out"),
    Fuse(
        "tower.queries.blocks.*.mlp.gate_up",
        gate="model.model.layers.*.mlp.gate_proj",
        up="model.model.layers.*.mlp.up_proj",
    ),
    Rename("model.model.layers.*.mlp.down_proj", "tower.queries.blocks.*.mlp.down"),
    Rename("model.model.norm", "tower.queries.norm"),
    Exact("query_768.weight", "tower.queries.of_tile.weight"),
    Exact("query_1024.weight", "tower.queries.of_whole.weight"),
)
ENDS: Final[tuple[Rule, ...]] = (
    Rename("projector.layers", "tower.project"),
    Exact("view_seperator", "tower.separator.weight"),  # as checkpoints spell it
)
WEIGHTS = seeing_weights(
    deepseek_v1.WEIGHTS, SAM, ("model.sam_model.",), (QUERIES, ("model.qwen2_model.",)), (ENDS, ("model.",))
)
make = with_tower(deepseek_v1.make, _tower)
