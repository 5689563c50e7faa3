"""Sounds for Qwen2-Audio: Whisper's spectrum, of at most 30 s."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bough.config.audio import POOLED
from bough.config.fields import Fields
from bough.multimodal.hearing import HearingProcessor, padded_spectrum
from bough.multimodal.processor import ItemShape, Options

_LEAST = 4
"""Frames of a spectrum, which make one position."""


class Qwen2AudioProcessor(HearingProcessor):
    """Four frames of the spectrum are a position."""

    family = "qwen2-audio-1"

    def __init__(self, config: Fields) -> None:
        super().__init__(config, config.count("audio_token_id", "audio_token_index"))

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """The spectrum is that of the sound with silence behind it: as much of it as the convolutions reach into is kept."""
        facts = self.facts
        frames = max(_LEAST, min(facts.frames, -(-len(samples) // facts.hop)))
        tokens = (frames - 1) // 2 + 1
        kept = padded_spectrum(facts, samples, facts.frames)[: min(facts.frames, 2 * tokens + 2)]
        return np.ascontiguousarray(kept), (ItemShape((tokens,), (tokens - 2) // POOLED + 1, tokens),)
