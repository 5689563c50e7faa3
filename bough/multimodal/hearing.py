"""What processors of families that hear share: spectra of a sound with silence behind it, and runs of placeholders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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
    PlaceholderRun,
    Processed,
    Processor,
    SoundRules,
    unknown_option,
)
from bough.multimodal.spectrum import F32, log_mel

if TYPE_CHECKING:
    from PIL.Image import Image


class Spectra(Protocol):
    """How a family's spectra are made."""

    @property
    def mels(self) -> int: ...
    @property
    def rate(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def hop(self) -> int: ...


def padded_spectrum(facts: Spectra, samples: F32, frames: int) -> F32:
    """[frames, mels] of a sound that ends with them, or with silence behind it. Its loudest place scales all of it."""
    whole = np.zeros(frames * facts.hop, np.float32)
    whole[: len(samples)] = samples[: len(whole)]
    return log_mel(whole, mels=facts.mels, rate=facts.rate, window=facts.window, hop=facts.hop)


def lone_spectrum(facts: Spectra, samples: F32, least: int) -> F32:
    """[frames, mels] of a sound with nothing behind it, but silence up to `least` samples."""
    samples = np.pad(samples, (0, max(0, least - len(samples))))
    return log_mel(samples, mels=facts.mels, rate=facts.rate, window=facts.window, hop=facts.hop)


class HearingProcessor(Processor):
    """Of Whisper's encoder, alone or before a language model. A family says how a spectrum becomes items (`audio`)."""

    kinds = frozenset({"audio"})
    family: str
    """Its name and version, which features depend on."""

    def __init__(self, config: Fields, token: int = 0) -> None:
        """`token`: the placeholder; 0: the family has none."""
        self.facts = read_hearing(config)
        self.token = token

    @property
    def identity(self) -> str:
        facts = self.facts
        return json.dumps([self.family, facts.mels, facts.frames, facts.rate, facts.window, facts.hop])

    @property
    def sound(self) -> SoundRules:
        return SoundRules(self.facts.rate, self.facts.seconds)

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        for name in given:
            raise unknown_option(name, [])
        return {}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        raise NotImplementedError

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]
