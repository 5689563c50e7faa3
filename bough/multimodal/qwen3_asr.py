"""Sounds for Qwen3-ASR: heard as by Qwen3-Omni, each with the end that it has."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.omni import read_omni_hearing
from bough.multimodal.hearing import HearingProcessor, lone_spectrum
from bough.multimodal.processor import ItemShape, Options, SoundRules
from bough.multimodal.qwen_omni import segment_items

_SECONDS: Final = 1200.0
"""Of a sound at most, as its authors take them..."""
_PIECE: Final = 300.0
"""...and of a piece that is transcribed by itself."""


class Qwen3AsrProcessor(HearingProcessor):
    """Behind a short sound is silence, and nothing behind the last chunk of its spectrum."""

    family = "qwen3-asr-1"

    def __init__(self, config: Fields) -> None:
        super().__init__(config, config.count("audio_token_id", default=151_676))
        self.hearing = read_omni_hearing(config, "3")
        self.least = processor_fields(config, "feature_extractor").size("min_length", default=8000)
        """Samples."""

    @property
    def identity(self) -> str:
        return json.dumps([super().identity, self.hearing.chunk, self.hearing.segment, self.least])

    @property
    def sound(self) -> SoundRules:
        return SoundRules(self.facts.rate, _SECONDS, _PIECE)

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        ear = self.hearing
        spectrum = lone_spectrum(ear, samples, max(self.least, ear.window))
        whole = np.pad(spectrum, ((0, -len(spectrum) % ear.chunk), (0, 0)))
        return whole, segment_items(ear, len(spectrum), len(whole))
