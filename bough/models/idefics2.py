"""Idefics 2: images of their own shapes, of which learned queries make 64 positions each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.idefics2 import read_idefics2
from bough.config.model_facts import ModelFacts
from bough.models.makers import pre_norm
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.text_inside import WEIGHTS as TEXT, read_inside
from bough.models.vit_vision import VIT
from bough.weights.mapping import Exact, Fuse, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def read(config: Fields) -> ModelFacts:
    return replace(read_inside(config), tower=tower_of(config, read_idefics2(config).tower()))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.idefics2_tower import Idefics2Tower

    return Idefics2Tower(read_idefics2(Fields(facts.config)), build)


CONNECTOR: Final[tuple[Rule, ...]] = (
    Rename("modality_projection.gate_proj", "tower.project.gate"),
    Rename("modality_projection.up_proj", "tower.project.up"),
    Rename("modality_projection.down_proj", "tower.project.down"),
    Exact("perceiver_resampler.latents", "tower.queries.weight"),
    Rename("perceiver_resampler.layers.*.input_latents_norm", "tower.readers.*.query_norm"),
    Rename("perceiver_resampler.layers.*.input_context_norm", "tower.readers.*.patch_norm"),
    Rename("perceiver_resampler.layers.*.self_attn.q_proj", "tower.readers.*.q"),
    Rename("perceiver_resampler.layers.*.self_attn.k_proj", "tower.readers.*.k"),
    Rename("perceiver_resampler.layers.*.self_attn.v_proj", "tower.readers.*.v"),
    Rename("perceiver_resampler.layers.*.self_attn.o_proj", "tower.readers.*.out"),
    Rename("perceiver_resampler.layers.*.post_attention_layernorm", "tower.readers.*.mlp_norm"),
    Fuse(
        "tower.readers.*.mlp.gate_up",
        gate="perceiver_resampler.layers.*.mlp.gate_proj",
        up="perceiver_resampler.layers.*.mlp.up_proj",
    ),
    Rename("perceiver_resampler.layers.*.mlp.down_proj", "tower.readers.*.mlp.down"),
    Rename("perceiver_resampler.norm", "tower.post_norm"),
)
WEIGHTS = seeing_weights(
    TEXT, VIT, ("model.vision_model.",), (CONNECTOR, ("model.connector.",)), bodies=(("model.text_model.", ""),)
)
make = with_tower(pre_norm, _tower)
