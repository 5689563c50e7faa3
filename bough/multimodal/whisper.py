"""Sounds for Whisper: the spectrum of a window, with silence behind what is shorter."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bough.multimodal.hearing import HearingProcessor, padded_spectrum
from bough.multimodal.processor import ItemShape, Options


class WhisperProcessor(HearingProcessor):
    """Every sound becomes a whole window: the decoder reads the silence behind it, too."""

    in_prompt = False
    family = "whisper-1"

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        facts = self.facts
        spectrum = padded_spectrum(facts, samples, facts.frames)
        return spectrum, (ItemShape((facts.positions,), facts.positions, facts.positions),)
