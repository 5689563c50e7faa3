"""Images and sounds for Gemma 3n: one square an image, whatever its shape, and equally many positions for every sound."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.gemma3n_media import read_gemma3n_media
from bough.core.media import MediaKind
from bough.multimodal.embeds import bad_embeddings
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    SoundRules,
    Token,
    unknown_option,
)
from bough.multimodal.usm_spectrum import usm_spectrum

if TYPE_CHECKING:
    from PIL.Image import Image

_MULTIPLE = 128
"""Samples: sounds are filled up with silence to a multiple, as in training."""


class Gemma3nProcessor(Processor):
    """An image's grid is the rows and columns of its positions, a sound's the frames of its spectrum."""

    kinds = frozenset({"image", "audio"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_gemma3n_media(config)
        self.tokens: dict[MediaKind, int] = {
            "image": config.count("image_token_id", default=262_145),
            "audio": config.count("audio_token_id", default=262_273),
        }
        self.around: dict[MediaKind, tuple[int, int]] = {
            "image": (config.count("boi_token_id", default=255_999), config.count("eoi_token_id", default=262_144)),
            "audio": (config.count("boa_token_id", default=256_000), config.count("eoa_token_id", default=262_272)),
        }

    @property
    def identity(self) -> str:
        facts = self.facts
        squares = [facts.seeing.pixels, facts.seeing.side, facts.image.resample]
        return json.dumps(["gemma3n-1", *squares, facts.sound_positions, *astuple(facts.spectrum)])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        for name in given:
            raise unknown_option(name, [])
        return {}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        eye = self.facts.seeing
        pixels = np.asarray(image.resize((eye.pixels, eye.pixels), self.facts.image.resample))[None]
        return pixels, (ItemShape((eye.side, eye.side), self.facts.image_positions, eye.tokens),)

    def embedded(self, count: int, grid: tuple[int, ...]) -> ItemShape:
        if count != self.facts.image_positions or grid:
            raise bad_embeddings(f"an image has {self.facts.image_positions} positions, and no grid")
        return ItemShape((self.facts.seeing.side,) * 2, count, 0, embedded=True)

    @property
    def sound(self) -> SoundRules:
        return SoundRules(self.facts.spectrum.rate, self.facts.samples / self.facts.spectrum.rate)

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        facts = self.facts
        least = max(len(samples), facts.spectrum.window + 1)
        whole = np.pad(samples, (0, least + -least % _MULTIPLE - len(samples)))
        spectrum = usm_spectrum(facts.spectrum, whole)
        return spectrum, (ItemShape((len(spectrum),), facts.sound_positions, facts.hearing.tokens(len(spectrum))),)

    def marker(self, kind: MediaKind) -> Marker:
        token = self.tokens[kind]
        return Marker((token,), (token,), token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        start, end = self.around[kind]
        runs = [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]
        return ["\n\n", Token(start), *runs, Token(end), "\n\n"]
