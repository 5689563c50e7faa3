"""Gemma 3 of 4B and more, which also sees: means of squares of a SigLIP tower's patches, 256 an image. Tokens of an image
see each other in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, NormFacts
from bough.config.vit import gemma3_vit, pooled_by
from bough.models import gemma3
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.vit_vision import PROJECTORS, TOWERS, VIT, tiled
from bough.weights.mapping import Exact, Rename

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower

_LEFT_OUT: Final = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""What published files don't say, since it is transformers' default."""


def read(config: Fields) -> ModelFacts:
    facts = gemma3.read(config.put(**{key: value for key, value in _LEFT_OUT.items() if not config.has(key)}))
    if not config.has("vision_config"):
        return facts
    vit = gemma3_vit(config)
    projector = vit.block.hidden * facts.hidden + vit.block.hidden
    positions = (vit.side // pooled_by(config, vit)) ** 2
    tower = tiled(vit, width=facts.hidden, projector=projector, positions=positions, tiles=1, atomic=True)
    return replace(facts, tower=tower_of(config, tower))


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.layers.projectors import PooledLinear
    from bough.layers.tower import alone
    from bough.layers.vit import TiledTower

    config = Fields(facts.config)
    vit = gemma3_vit(config)
    norm = NormFacts(eps=vit.block.norm.eps, offset=1.0)
    widths = (vit.block.hidden, facts.hidden)
    project = PooledLinear(widths, alone(build), side=vit.side, by=pooled_by(config, vit), norm=norm)
    return TiledTower(vit, project, facts.hidden, build)


make = with_tower(gemma3.make, _tower)
WEIGHTS = seeing_weights(
    gemma3.WEIGHTS,
    VIT,
    TOWERS,
    (
        (
            Exact("mm_input_projection_weight", "tower.project.matrix.weight"),
            Rename("mm_soft_emb_norm", "tower.project.norm"),
        ),
        PROJECTORS,
    ),
)
