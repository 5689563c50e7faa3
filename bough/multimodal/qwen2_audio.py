"""Sounds for Qwen2-Audio: Whisper's spectrum, of at most 30 s."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.audio import POOLED, read_hearing
from bough.config.fields import Fields
from bough.core.media import MediaKind
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    SoundRules,
    unknown_option,
)
from bough.multimodal.spectrum import log_mel

if TYPE_CHECKING:
    from PIL.Image import Image

_LEAST = 4
"""Frames of a spectrum, which make one position."""


class Qwen2AudioProcessor(Processor):
    """Four frames of the spectrum are a position."""

    kinds = frozenset({"audio"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_hearing(config)
        self.token = config.count("audio_token_id", "audio_token_index")

    @property
    def identity(self) -> str:
        facts = self.facts
        return json.dumps(["qwen2-audio-1", facts.mels, facts.frames, facts.rate, facts.window, facts.hop])

    @property
    def sound(self) -> SoundRules:
        return SoundRules(self.facts.rate, self.facts.seconds)

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        for name in given:
            raise unknown_option(name, [])
        return {}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        raise NotImplementedError

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """The spectrum is that of the sound with silence behind it: as much of it as the convolutions reach into is kept."""
        facts = self.facts
        whole = np.zeros(facts.frames * facts.hop, np.float32)
        whole[: len(samples)] = samples[: len(whole)]
        frames = max(_LEAST, min(facts.frames, -(-len(samples) // facts.hop)))
        spectrum = log_mel(whole, mels=facts.mels, rate=facts.rate, window=facts.window, hop=facts.hop)
        tokens = (frames - 1) // 2 + 1
        kept = np.ascontiguousarray(spectrum[: min(facts.frames, 2 * tokens + 2)])
        return kept, (ItemShape((tokens,), (tokens - 2) // POOLED + 1, tokens),)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]
