"""Processors whose towers see tiles of one size."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import ImageFacts
from bough.core.media import MediaKind
from bough.multimodal.embeds import bad_embeddings
from bough.multimodal.frames import FRAME_OPTIONS, FrameRules, frame_option
from bough.multimodal.processor import (
    ItemShape,
    Mark,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    VideoInfo,
    bounded_count,
    unknown_option,
)

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]


class TileProcessor(Processor):
    """Images, and videos of frames that are a tile each, where the family has `rules` for them. `bounds`: options that a
    request may send for images, and the largest value of each."""

    kinds = frozenset({"image"})
    bounds: Mapping[str, int] = {}
    rules: FrameRules | None = None
    side: int
    """Pixels along a side of a tile."""

    def __init__(self, *, patches: int, positions: int, facts: ImageFacts, token: int, insert: Mark = ()) -> None:
        """`patches`, `positions`: of a tile. `insert`: as `Marker.insert`, if it is not the placeholder alone."""
        self.patches = patches
        self.positions_of_tile = positions
        self.facts = facts
        self.token = token
        self._insert = insert or (token,)

    @property
    def identity(self) -> str:
        return json.dumps([type(self).__name__, 1, self.patches, self.positions_of_tile, *self.settings()])

    @abstractmethod
    def settings(self) -> Sequence[Any]:
        """What tiles depend on, of this family."""

    @abstractmethod
    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        """The tiles of an image, and how many rows and columns of them there are before the image as a whole; 0 and 0: it
        was not cut."""

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        known = {*self.bounds, *(() if self.rules is None else FRAME_OPTIONS)}
        for name, value in given.items():
            if name not in known:
                raise unknown_option(name, sorted(known))
            if value is None or (name in FRAME_OPTIONS) != (kind == "video"):
                continue
            checked[name] = (
                frame_option(name, value) if kind == "video" else bounded_count(name, value, 1, self.bounds[name])
            )
        return checked

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        tiles, (rows, columns) = self.tiles(image, options)
        pixels = np.stack([np.asarray(tile) for tile in tiles])
        count = len(tiles) * self.positions_of_tile
        return pixels, (ItemShape((len(tiles), rows, columns), count, len(tiles) * self.patches),)

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        assert self.rules is not None, "the family takes videos"
        return self.rules.evenly(info, options)

    def frame(self, image: Image) -> Image:
        """A frame of a video as a tile."""
        return image.resize((self.side, self.side), self.facts.resample)

    def video(
        self, info: VideoInfo, indices: Sequence[int], frames: Iterable[Image], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...], tuple[str, ...]]:
        pixels = np.stack([np.asarray(self.frame(image)) for image in frames])
        return pixels, self.frame_items(len(pixels)), self.notes(info, indices)

    def frame_items(self, count: int) -> tuple[ItemShape, ...]:
        """Those of a video, by its number of frames."""
        return tuple(
            ItemShape((1, 0, 0), self.positions_of_tile, self.patches, number, number + 1) for number in range(count)
        )

    def notes(self, info: VideoInfo, indices: Sequence[int]) -> tuple[str, ...]:
        """Texts that stand beside the frames of a video: `Processed.notes`."""
        return ()

    def embedded(self, count: int, grid: tuple[int, ...]) -> ItemShape:
        if count != self.positions_of_tile or grid:
            raise bad_embeddings(f"an image that is one tile has {self.positions_of_tile} positions, and no grid")
        return ItemShape((1, 0, 0), count, 0, embedded=True)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), self._insert, self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]


def image_token(config: Fields) -> int:
    """The placeholder's id, by its names in configs of several generations."""
    return config.count("image_token_id", "image_token_index")


def patches_of(pixels: Pixels, patch: int) -> Pixels:
    """[rows x columns, patch, patch, 3] of an image whose edges are multiples of `patch`."""
    height, width, _ = pixels.shape
    cut = pixels.reshape(height // patch, patch, width // patch, patch, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(-1, patch, patch, 3)
