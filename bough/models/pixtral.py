"""What Pixtral, in LLaVA's frame, and Mistral 3 have in common: facts with a tower, its maker, and names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, NormFacts
from bough.config.pixtral import PixtralVision, read_pixtral
from bough.models.seeing import tower_of
from bough.models.vit_vision import two_linears
from bough.weights.mapping import Fuse, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower


def _bias(config: Fields, vision: PixtralVision) -> bool:
    """Of the projector: Mistral 3 leaves it out."""
    return config.flag("multimodal_projector_bias", default=vision.merge == 1)


def with_pixtral(facts: ModelFacts, config: Fields) -> ModelFacts:
    """The facts with those of the tower."""
    vision = read_pixtral(config)
    hidden = vision.block.hidden
    projector = two_linears(hidden, facts.hidden, bias=_bias(config, vision))
    if vision.merge > 1:
        projector += hidden + hidden * vision.merge**2 * hidden
    return replace(facts, tower=tower_of(config, vision.tower(facts.hidden, projector)))


def make_pixtral(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.pixtral_tower import PixtralTower

    config = Fields(facts.config)
    vision = read_pixtral(config)
    return PixtralTower(
        vision,
        facts.hidden,
        build,
        activation=config.choice(reading.ACTIVATIONS, "projector_hidden_act", default="gelu"),
        bias=_bias(config, vision),
        merger_norm=NormFacts(eps=facts.norm.eps) if vision.merge > 1 else None,
    )


TOWER: Final[tuple[Rule, ...]] = (
    Rename("patch_conv", "tower.patches"),
    Rename("ln_pre", "tower.pre_norm"),
    Rename("transformer.layers.*.attention_norm", "tower.blocks.*.attn_norm"),
    Rename("transformer.layers.*.ffn_norm", "tower.blocks.*.mlp_norm"),
    Fuse(
        "tower.blocks.*.attn.qkv",
        q="transformer.layers.*.attention.q_proj",
        k="transformer.layers.*.attention.k_proj",
        v="transformer.layers.*.attention.v_proj",
    ),
    Rename("transformer.layers.*.attention.o_proj", "tower.blocks.*.attn.out"),
    Fuse(
        "tower.blocks.*.mlp.gate_up",
        gate="transformer.layers.*.feed_forward.gate_proj",
        up="transformer.layers.*.feed_forward.up_proj",
    ),
    Rename("transformer.layers.*.feed_forward.down_proj", "tower.blocks.*.mlp.down"),
)
TOWERS: Final = ("vision_tower.", "model.vision_tower.")
MERGER: Final[tuple[Rule, ...]] = (
    Rename("norm", "tower.merger.norm"),
    Rename("patch_merger.merging_layer", "tower.merger.linear"),
)
