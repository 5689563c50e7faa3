"""Phi-4-multimodal: Phi-4-mini with SigLIP over tiles and the whole image, a conformer over sound, and two adapters. Prompts
with images are computed with one of them, prompts with sounds alone with the other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.phi4mm import read_phi4mm
from bough.config.phi4mm_config import ADAPTERS
from bough.models import phi3
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.models.vit_vision import VIT
from bough.weights.mapping import Exact, Fuse, Mapping, Outside, Rename, Rule, Split

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower

_log = logging.getLogger(__name__)


def read(config: Fields) -> ModelFacts:
    towers = read_phi4mm(config)
    facts = replace(phi3.read(config), tower=tower_of(config, towers.tower()))
    return facts if facts.tower is None else facts.with_adapters(towers.adapters, built_in=True)


def _tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.phi4mm_tower import Phi4Tower

    there = {each.name for each in facts.adapters}
    if missing := [f"{name}-lora" for name in ADAPTERS if name not in there]:
        _log.warning(
            "the checkpoint has no %s: their media are understood by the language model alone", " and no ".join(missing)
        )
    return Phi4Tower(read_phi4mm(Fields(facts.config)), build)


TEXT: Final = Mapping(
    *phi3.WEIGHTS.rules,
    Split("model.layers.*.self_attn.qkv_proj.base_layer", "layers.*.attn.qkv", parts=("q", "k", "v")),
    Rename("model.layers.*.self_attn.o_proj.base_layer", "layers.*.attn.out"),
    Split("model.layers.*.mlp.gate_up_proj.base_layer", "layers.*.mlp.gate_up", parts=("gate", "up")),
    Rename("model.layers.*.mlp.down_proj.base_layer", "layers.*.mlp.down"),
)
"""Where matrices have adapters, their own weights are called `base_layer`."""
PICTURES: Final[tuple[Rule, ...]] = (
    Rename("img_projection_up", "tower.see.steps.0"),
    Rename("img_projection_down", "tower.see.steps.2"),
    Rename("img_projection.*", "tower.see.steps.*"),
    Exact("sub_img_feature_extensor", "tower.row_mark.weight"),
    Exact("sub_GN", "tower.row_mark.weight"),
    Exact("global_img_feature_extensor", "tower.whole_mark.weight"),
    Exact("glb_GN", "tower.whole_mark.weight"),
)
"""Names below what sees, of transformers and of the original checkpoint..."""
SOUNDS: Final[tuple[Rule, ...]] = (
    Rename("up_proj_for_speech", "tower.hear_alone.steps.0"),
    Rename("down_proj_for_speech", "tower.hear_alone.steps.2"),
    Rename("audio_projection.speech.*", "tower.hear_alone.steps.*"),
    Rename("up_proj_for_vision_speech", "tower.hear_seeing.steps.0"),
    Rename("down_proj_for_vision_speech", "tower.hear_seeing.steps.2"),
    Rename("audio_projection.vision.*", "tower.hear_seeing.steps.*"),
)
"""...below what hears..."""
_BLOCK: Final = "encoders.*"
_OURS: Final = "tower.ear.blocks.*"


def _feed_forward(source: str, target: str) -> tuple[Rule, ...]:
    return (
        Rename(f"{_BLOCK}.{source}.layer_norm", f"{_OURS}.{target}.norm"),
        *(
            Rename(f"{_BLOCK}.{source}.{name}", f"{_OURS}.{target}.up_gate")
            for name in ("gate_up_proj", "net.*.linear")
        ),
        *(Rename(f"{_BLOCK}.{source}.{name}", f"{_OURS}.{target}.down") for name in ("down_proj", "net.*")),
    )


def _attention(names: Sequence[str], out: str) -> tuple[Rule, ...]:
    q, k, v = (f"{_BLOCK}.self_attn.{name}" for name in names)
    return (
        Fuse(f"{_OURS}.qkv", q=q, k=k, v=v),
        Rename(f"{_BLOCK}.self_attn.{out}", f"{_OURS}.out"),
    )


CONFORMER: Final[tuple[Rule, ...]] = (
    Outside("pos_emb."),
    Exact("encoder_embedding.global_mean", "tower.ear.mean.weight"),
    Exact("encoder_embedding.global_invstd", "tower.ear.inverse.weight"),
    Rename("embed.conv.*", "tower.ear.shrink.*"),
    Rename("embed.out", "tower.ear.out"),
    Exact("relative_attention_bias_layer.bias_values.weight", "tower.ear.bias.weight"),
    *_feed_forward("feed_forward_in", "before"),
    *_feed_forward("feed_forward_out", "behind"),
    *_attention(("q_proj", "k_proj", "v_proj"), "o_proj"),
    *_attention(("linear_q", "linear_k", "linear_v"), "linear_out"),
    Rename(f"{_BLOCK}.layer_norm_att", f"{_OURS}.attn_norm"),
    Rename(f"{_BLOCK}.layer_norm", f"{_OURS}.norm"),
    Rename(f"{_BLOCK}.conv.layer_norm", f"{_OURS}.conv.norm"),
    Rename(f"{_BLOCK}.conv.glu.ext_pw_conv_1d", f"{_OURS}.conv.gates"),
    Exact(f"{_BLOCK}.conv.glu.b1", f"{_OURS}.conv.value_bias.weight"),
    Exact(f"{_BLOCK}.conv.glu.b2", f"{_OURS}.conv.gate_bias.weight"),
    Rename(f"{_BLOCK}.conv.dw_sep_conv_1d.dw_conv", f"{_OURS}.conv.along"),
    Rename(f"{_BLOCK}.conv.dw_sep_conv_1d.pw_conv", f"{_OURS}.conv.across"),
    Rename(f"{_BLOCK}.conv.ext_pw_conv_1d", f"{_OURS}.conv.out"),
)
"""...and below its encoder."""
EMBED: Final = "model.embed_tokens_extend"
WEIGHTS = seeing_weights(
    TEXT,
    VIT,
    (f"{EMBED}.image_embed.img_processor.",),
    (PICTURES, (f"{EMBED}.image_embed.",)),
    (SOUNDS, (f"{EMBED}.audio_embed.",)),
    (CONFORMER, (f"{EMBED}.audio_embed.encoder.",)),
    bodies=(("model.", ""),),
)
make = with_tower(phi3.make, _tower)
