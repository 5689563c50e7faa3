"""EXAONE 4: norms after each half of a block and of each head; layers that see everything have no positions where others
have windows."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, POST_NORMS
from bough.models.makers import post_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config)
    norm = reading.rms_norm(config, default=1e-5)
    pattern = config.any("sliding_window_pattern") or 4
    every = len(pattern) if isinstance(pattern, str) else int(pattern)
    windows = reading.windows(config, lambda layer: (layer + 1) % every != 0)
    hybrid = config.has("sliding_window")
    ropes = reading.same_rope(config, width)
    ropes = tuple(None if hybrid and window is None else rope for window, rope in zip(windows, ropes, strict=True))
    attention = reading.gqa(config, width=width, windows=windows, ropes=ropes, head_norms=HeadNorms(norm=norm))
    return reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=norm)


WEIGHTS = Mapping(*ENDS, *POST_NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD)
make = post_norm
