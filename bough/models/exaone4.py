"""EXAONE 4: norms after each half of a block and of each head; layers that see everything have no positions where others
have windows."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, POST_NORMS
from bough.models.makers import post_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    attention = attention_of(config)
    norm = reading.rms_norm(config, default=1e-5)
    return reading.decoder(config, attention, [reading.dense(config)] * len(attention), norm=norm)


def attention_of(config: Fields) -> list[Gqa]:
    width = reading.head_dim(config)
    pattern = config.any("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else config.size("sliding_window_pattern", default=4) or 4
    windows = reading.windows(config, lambda layer: (layer + 1) % every != 0, default=4096)
    ropes = reading.same_rope(config, width)
    if any(window is not None for window in windows):
        ropes = reading.only_in_windows(ropes, windows)
    norm = reading.rms_norm(config, default=1e-5)
    return reading.gqa(config, width=width, windows=windows, ropes=ropes, head_norms=HeadNorms(norm=norm))


WEIGHTS = Mapping(*ENDS, *POST_NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD)
make = post_norm
