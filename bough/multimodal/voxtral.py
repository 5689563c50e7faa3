"""Sounds for Voxtral: Whisper's spectrum in windows of 30 s, silence behind the last one."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bough.config.audio import merged_tokens
from bough.config.fields import Fields
from bough.multimodal.hearing import HearingProcessor, padded_spectrum
from bough.multimodal.processor import ItemShape, Options, SoundRules

_WINDOWS: Final = 60
"""Of a sound at most: half an hour, for which it was trained to transcribe."""
_PIECE: Final = 10
"""Windows of a piece that is transcribed by itself."""


class VoxtralProcessor(HearingProcessor):
    """Each window is an item, whose positions follow one another."""

    family = "voxtral-1"

    def __init__(self, config: Fields) -> None:
        super().__init__(config, config.count("audio_token_id", "audio_token_index", default=24))
        self.merged = merged_tokens(self.facts)

    @property
    def identity(self) -> str:
        return json.dumps([super().identity, self.merged])

    @property
    def sound(self) -> SoundRules:
        seconds = self.facts.seconds
        return SoundRules(self.facts.rate, _WINDOWS * seconds, _PIECE * seconds)

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """The loudest place of the whole sound scales the spectrum of all windows."""
        facts = self.facts
        windows = max(1, -(-len(samples) // (facts.frames * facts.hop)))
        count = facts.positions // self.merged
        items = [
            ItemShape((facts.positions,), count, facts.positions, number * facts.frames, (number + 1) * facts.frames)
            for number in range(windows)
        ]
        return padded_spectrum(facts, samples, windows * facts.frames), tuple(items)
