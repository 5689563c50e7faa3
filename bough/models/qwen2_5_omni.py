"""Qwen2.5-Omni's thinker: Qwen2.5-VL, with an encoder of Whisper's kind beside its tower."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.config.omni import read_omni_hearing
from bough.models import qwen2
from bough.models.makers import pre_norm
from bough.models.omni import ENCODER, make_omni_tower, omni_weights
from bough.models.qwen2_5_vl import MLP
from bough.models.qwen2_vl import ATTENTION, MERGER, read_text
from bough.models.qwen_vision import read_vision
from bough.models.seeing import tower_of, with_tower
from bough.weights.mapping import Fuse, Outside, Rename, Rule, Split


def read(config: Fields) -> ModelFacts:
    towers = read_omni_hearing(config, "2.5").beside(read_vision(config, "2.5").tower())
    return replace(read_text(config), tower=tower_of(config, towers))


_VISION: Final[tuple[Rule, ...]] = (
    *(rule for rule in ATTENTION if not isinstance(rule, Split)),
    Fuse("tower.blocks.*.attn.qkv", q="blocks.*.attn.q", k="blocks.*.attn.k", v="blocks.*.attn.v"),
    *MERGER,
    *MLP,
)
_AUDIO: Final[tuple[Rule, ...]] = (
    *ENCODER,
    Rename("conv1", "tower.conv1"),
    Rename("conv2", "tower.conv2"),
    Rename("proj", "tower.project"),
    Outside("audio_bos_eos_token."),
)
WEIGHTS = omni_weights(qwen2.WEIGHTS, _VISION, _AUDIO)
make = with_tower(pre_norm, partial(make_omni_tower, kind="2.5"))
