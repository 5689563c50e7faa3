"""Sounds for Voxtral: Whisper's spectrum in windows of 30 s, silence behind the last one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bough.config.audio import merged_tokens, read_hearing
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

_WINDOWS: Final = 60
"""Of a sound at most: half an hour, for which it was trained to transcribe."""
_PIECE: Final = 10
"""Windows of a piece that is transcribed by itself."""


class VoxtralProcessor(Processor):
    """Each window is an item, whose positions follow one another."""

    kinds = frozenset({"audio"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_hearing(config)
        self.merged = merged_tokens(self.facts)
        self.token = config.count("audio_token_id", "audio_token_index", default=24)

    @property
    def identity(self) -> str:
        facts = self.facts
        return json.dumps(["voxtral-1", facts.mels, facts.frames, facts.rate, facts.window, facts.hop, self.merged])

    @property
    def sound(self) -> SoundRules:
        seconds = self.facts.seconds
        return SoundRules(self.facts.rate, _WINDOWS * seconds, _PIECE * seconds)

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        for name in given:
            raise unknown_option(name, [])
        return {}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        raise NotImplementedError

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """The loudest place of the whole sound scales the spectrum of all windows."""
        facts = self.facts
        size = facts.frames * facts.hop
        windows = max(1, -(-len(samples) // size))
        whole = np.zeros(windows * size, np.float32)
        whole[: len(samples)] = samples
        spectrum = log_mel(whole, mels=facts.mels, rate=facts.rate, window=facts.window, hop=facts.hop)
        count = facts.positions // self.merged
        items = [
            ItemShape((facts.positions,), count, facts.positions, number * facts.frames, (number + 1) * facts.frames)
            for number in range(windows)
        ]
        return spectrum, tuple(items)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]
