"""Processors whose towers see tiles of one size."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import ImageFacts
from bough.core.media import MediaKind
from bough.multimodal.embeds import bad_embeddings
from bough.multimodal.processor import (
    ItemShape,
    Mark,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    bounded_count,
    unknown_option,
)

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]


class TileProcessor(Processor):
    """Images only. `bounds`: options that a request may send, and the largest value of each."""

    kinds = frozenset({"image"})
    bounds: Mapping[str, int] = {}

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
        for name, value in given.items():
            if name not in self.bounds:
                raise unknown_option(name, list(self.bounds))
            if value is not None:
                checked[name] = bounded_count(name, value, 1, self.bounds[name])
        return checked

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        tiles, (rows, columns) = self.tiles(image, options)
        pixels = np.stack([np.asarray(tile) for tile in tiles])
        count = len(tiles) * self.positions_of_tile
        return pixels, (ItemShape((len(tiles), rows, columns), count, len(tiles) * self.patches),)

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
