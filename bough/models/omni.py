"""What Qwen's Omni models have in common: a *thinker*, which writes text about what it reads, sees and hears.

Their talkers, which speak, are not computed. A checkpoint's config is that of its thinker (`config.hf`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.omni import read_omni_hearing
from bough.models.qwen_vision import read_vision
from bough.models.seeing import BODIES, seeing_weights
from bough.weights.mapping import Fuse, Mapping, Outside, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower

ENCODER: Final[tuple[Rule, ...]] = (
    Rename("ln_post", "tower.norm"),
    Rename("layers.*.self_attn_layer_norm", "tower.blocks.*.attn_norm"),
    Rename("layers.*.final_layer_norm", "tower.blocks.*.mlp_norm"),
    Fuse(
        "tower.blocks.*.attn.qkv",
        q="layers.*.self_attn.q_proj",
        k="layers.*.self_attn.k_proj",
        v="layers.*.self_attn.v_proj",
    ),
    Rename("layers.*.self_attn.out_proj", "tower.blocks.*.attn.out"),
    Rename("layers.*.fc1", "tower.blocks.*.mlp.up"),
    Rename("layers.*.fc2", "tower.blocks.*.mlp.down"),
)
"""Names below what hears..."""
CONVOLUTIONS: Final[tuple[Rule, ...]] = (
    *(Rename(f"conv2d{number + 1}", f"tower.convs.{number}") for number in range(3)),
    Rename("conv_out", "tower.conv_out"),
)
"""...and those of Qwen3's convolutions."""
_THINKER: Final = (*BODIES, ("thinker.model.", "thinker."))
_PREFIXES: Final = ("", "model.", "thinker.")
_OTHERS: Final = ("talker.", "token2wav.", "code2wav.")


def omni_weights(text: Mapping, seeing: Sequence[Rule], hearing: Sequence[Rule]) -> Mapping:
    """`seeing`, `hearing`: rules of towers that stand alone."""
    weights = seeing_weights(
        text,
        [_below(rule, "seeing") for rule in seeing],
        [f"{prefix}visual." for prefix in _PREFIXES],
        ([_below(rule, "hearing") for rule in hearing], [f"{prefix}audio_tower." for prefix in _PREFIXES]),
        bodies=_THINKER,
    )
    return Mapping(*weights.rules, *map(Outside, _OTHERS))


def _below(rule: Rule, part: str) -> Rule:
    """The rule of a tower that is a part of another one."""
    if isinstance(rule, Fuse):
        return Fuse(rule.target.replace("tower.", f"tower.{part}.", 1), **rule.parts)
    target = {} if isinstance(rule, Outside) else {"target": rule.target.replace("tower.", f"tower.{part}.", 1)}  # type: ignore[union-attr]
    return replace(rule, **target)  # type: ignore[arg-type]


def make_omni_tower(facts: ModelFacts, build: Build, kind: str) -> Tower:
    """`kind`: "2.5" or "3"."""
    from bough.models.omni_tower import OmniTower, SeeingAndHearing, ShrinkingTower
    from bough.models.qwen_tower import QwenTower

    config = Fields(facts.config)
    hearing = read_omni_hearing(config, kind)
    ear = ShrinkingTower(hearing, build) if hearing.channels else OmniTower(hearing, build)
    return SeeingAndHearing(QwenTower(read_vision(config, kind), build), ear)
