"""Images and sounds for Phi-4-multimodal: a canvas of tiles that an image fills as far as its shape allows, and spectra of
sounds. Which adapter a prompt is computed with follows from what it has."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.phi4mm import ALONE, BESIDE_IMAGES, SECONDS, read_phi4mm
from bough.core.media import MediaItem, MediaKind
from bough.multimodal.errors import MediaUnsupported
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    SoundRules,
    bounded_count,
    unknown_option,
)

if TYPE_CHECKING:
    from PIL.Image import Image

F32 = npt.NDArray[np.float32]
BILINEAR = 2
"""Pillow's number of the filter, whatever a checkpoint's settings say: they name that of the whole image."""
_LEAST = 10
"""Pixels of a resized image along each side."""
_LOUDEST = 2.0**15
"""What samples of -1 to 1 are multiplied by."""


class Phi4Processor(Processor):
    """An image with its tiles is one item, and so is a sound. See `models.phi4mm_tower` for their grids."""

    kinds = frozenset({"image", "audio"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_phi4mm(config)
        settings = processor_fields(config, "audio_processor")
        if not settings.has("hop_length"):
            settings = processor_fields(config, "feature_extractor")
        self.transform = settings.count("n_fft", default=512)
        self.emphasis = settings.number("preemphasis", default=0.97)
        self.highest = settings.positive("mel_max_frequency", default=7690.0)

    @property
    def identity(self) -> str:
        facts, ear = self.facts, self.facts.hearing
        seen = [facts.vit.patch, facts.vit.side, facts.most_tiles]
        heard = [ear.mels, ear.rate, ear.window, ear.hop, self.transform, self.emphasis, self.highest]
        return json.dumps(["phi4mm-1", seen, heard])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        for name, value in given.items():
            if name != "dynamic_hd":
                raise unknown_option(name, ["dynamic_hd"])
            if value is not None and kind == "image":
                checked[name] = bounded_count(name, value, 1, self.facts.most_tiles)
        return checked

    def together(self, items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
        """Sounds beside images are projected otherwise than sounds alone."""
        if all(item.kind != "image" for item in items):
            return items
        return tuple(_beside_images(item) if item.kind == "audio" else item for item in items)

    def adapter(self, kinds: Collection[MediaKind]) -> int:
        if "image" in kinds:
            return self.facts.adapter("vision")
        return self.facts.adapter("speech") if "audio" in kinds else 0

    def little_detail(self) -> Options:
        return {"dynamic_hd": 1}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        from PIL import Image as Pictures

        facts, edge = self.facts, self.facts.tile
        columns, rows = grid_of(*image.size, edge, int(options.get("dynamic_hd", facts.most_tiles)))
        across, down = columns * edge / image.width, rows * edge / image.height
        size = (columns * edge, int(image.height * across)) if across < down else (int(image.width * down), rows * edge)
        if min(size) < _LEAST:
            raise MediaUnsupported(
                what=f"this picture has {image.width} x {image.height} pixels",
                why=f"in the model's tiles it would be {size[0]} x {size[1]}, {_LEAST} are the least",
                fix="cut it, or send one that is less narrow",
            )
        canvas = Pictures.new("RGB", (columns * edge, rows * edge), (255, 255, 255))
        canvas.paste(image.resize(size, BILINEAR), (0, 0))
        patch, side = facts.vit.patch, facts.vit.side
        high, wide = (
            count * side - (count * edge - length) // patch
            for count, length in ((rows, size[1]), (columns, size[0]))
        )  # fmt: skip
        cost = (1 + rows * columns) * facts.vit.tokens
        shape = ItemShape((rows, columns, high, wide), facts.positions(high, wide), cost)
        return np.asarray(canvas), (shape,)

    @property
    def sound(self) -> SoundRules:
        return SoundRules(self.facts.hearing.rate, SECONDS)

    def audio(self, samples: F32, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        ear = self.facts.hearing
        samples = np.pad(samples, (0, max(0, ear.window - len(samples))))
        spectrum = self.spectrum(samples)
        count = ear.tokens(len(spectrum))
        return spectrum, (ItemShape((len(spectrum), ALONE), count, count),)

    def spectrum(self, samples: F32) -> F32:
        """[frames, mels]: logarithms of energies. A frame every `hop` samples, as long as they last; each loses what its
        samples have in common with those before them."""
        ear = self.facts.hearing
        frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float32), ear.window)[:: ear.hop]
        filters = _filters(ear.mels, ear.rate, self.transform, self.highest)
        window = np.hamming(ear.window)
        made = np.empty((len(frames), ear.mels), np.float32)
        for start in range(0, len(frames), 512):  # so that a long sound takes little memory
            piece = frames[start : start + 512]
            before = np.concatenate([piece[:, :1], piece[:, :-1]], 1)
            sharp = (piece - np.float32(self.emphasis) * before) * np.float32(_LOUDEST)
            spectrum = np.fft.rfft(sharp * window, self.transform).astype(np.complex64)
            power = np.abs(spectrum) ** 2
            made[start : start + 512] = np.log(np.maximum(power @ filters, np.float32(1.0)))
        return made

    def marker(self, kind: MediaKind) -> Marker:
        token = self.facts.image_token if kind == "image" else self.facts.audio_token
        return Marker((token,), (token,), token, numbered=f"<|{kind}_%d|>")

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(0, processed.items[0].count)]


def _beside_images(item: MediaItem) -> MediaItem:
    frames, mode = item.grid
    if mode == BESIDE_IMAGES:
        return item
    return structs.replace(item, grid=(frames, BESIDE_IMAGES), key=sha256(item.key + b"beside images").digest())


def grid_of(width: int, height: int, edge: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles for an image: as many as it fills, or where that are too many, those of the shape that is
    nearest to its own."""
    columns, rows = math.ceil(width / edge), math.ceil(height / edge)
    if columns * rows <= most:
        return columns, rows
    best, difference = (1, 1), math.inf
    for shape in _shapes(most):
        apart = abs(width / height - shape[0] / shape[1])
        if apart < difference or (apart == difference and width * height > 0.5 * edge * edge * shape[0] * shape[1]):
            best, difference = shape, apart
    return best


@lru_cache(maxsize=8)
def _shapes(most: int) -> list[tuple[int, int]]:
    """Of at most `most` tiles, those with fewer first."""
    shapes = {(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)}
    return sorted(shapes, key=lambda shape: shape[0] * shape[1])


@lru_cache(maxsize=4)
def _filters(mels: int, rate: int, transform: int, highest: float) -> F32:
    """[frequencies, mels]: triangles on the mel scale, equally wide there and equally high."""
    corners = np.linspace(_mel(np.float64(0.0)), _mel(np.float64(highest)), mels + 2)
    places = _mel(np.arange(transform // 2 + 1, dtype=np.float64) * (rate / transform))
    slopes = corners[None, :] - places[:, None]
    widths = np.diff(corners)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)


def _mel(hertz: npt.NDArray[Any] | np.float64) -> npt.NDArray[np.float64]:
    return np.asarray(1127.0 * np.log(1.0 + hertz / 700.0))
