"""Sounds for Whisper: the spectrum of a window of 30 s, silence behind what is shorter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.audio import read_hearing
from bough.config.fields import Fields
from bough.core.media import MediaKind
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    Processed,
    Processor,
    SoundRules,
    unknown_option,
)
from bough.multimodal.spectrum import log_mel

if TYPE_CHECKING:
    from PIL.Image import Image


class WhisperProcessor(Processor):
    """Every sound becomes a whole window: the decoder reads the silence behind it, too."""

    kinds = frozenset({"audio"})
    in_prompt = False

    def __init__(self, config: Fields) -> None:
        self.facts = read_hearing(config)

    @property
    def identity(self) -> str:
        facts = self.facts
        return json.dumps(["whisper-1", facts.mels, facts.frames, facts.rate, facts.window, facts.hop])

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
        facts = self.facts
        whole = np.zeros(facts.frames * facts.hop, np.float32)
        whole[: len(samples)] = samples[: len(whole)]
        spectrum = log_mel(whole, mels=facts.mels, rate=facts.rate, window=facts.window, hop=facts.hop)
        return spectrum, (ItemShape((facts.positions,), facts.positions, facts.positions),)

    def marker(self, kind: MediaKind) -> Marker:
        raise NotImplementedError

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return []
