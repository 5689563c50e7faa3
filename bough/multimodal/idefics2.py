"""Images for Idefics 2: within bounds of their edges, whole, or in quarters and whole; each has as many positions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.idefics2 import read_idefics2
from bough.core.media import MediaKind
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    bounded_count,
    unknown_option,
)
from bough.multimodal.tiles import image_token, patches_of

if TYPE_CHECKING:
    from PIL.Image import Image

_FAKE: Final = "<fake_token_around_image>"


class Idefics2Processor(Processor):
    """Quarters and wholes are items. An item's grid is rows and columns of patches."""

    kinds = frozenset({"image"})
    once = _FAKE

    def __init__(self, config: Fields) -> None:
        self.facts = read_idefics2(config)
        self.token = image_token(config)

    @property
    def identity(self) -> str:
        facts = self.facts
        sizes = [facts.vit.patch, facts.shortest, facts.longest, facts.queries, facts.vit.image.resample]
        return json.dumps(["idefics2-1", *sizes, facts.splits])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        for name, value in given.items():
            if name != "longest_edge":
                raise unknown_option(name, ["longest_edge"])
            if value is not None:
                checked[name] = bounded_count(name, value, self.facts.vit.patch, self.facts.longest)
        return checked

    def little_detail(self) -> Options:
        return {"longest_edge": min(self.facts.shortest, self.facts.longest)}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        longest, patch = int(options.get("longest_edge", self.facts.longest)), self.facts.vit.patch
        parts = [*_quarters(image), image] if self.facts.splits else [image]
        patches, items, first = [], [], 0
        for part in parts:
            width, height = _fitted(*part.size, self.facts.shortest, longest)
            rows, columns = height // patch, width // patch
            resized = part.resize((width, height), self.facts.vit.image.resample)
            patches.append(patches_of(np.asarray(resized)[: rows * patch, : columns * patch], patch))
            items.append(ItemShape((rows, columns), self.facts.queries, rows * columns, first, first + rows * columns))
            first += rows * columns
        return np.concatenate(patches), tuple(items)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        made: list[Piece] = [_FAKE]
        for number, item in enumerate(processed.items):
            made += [PlaceholderRun(number, item.count), _FAKE]
        return made

    def tidied(self, text: str) -> str:
        """A word behind an image has a space before it."""
        return re.sub(rf"{_FAKE}(?=[^\s<])", f"{_FAKE} ", text)


def _quarters(image: Image) -> list[Image]:
    width, height = image.size
    across, down = width // 2, height // 2
    boxes = [(0, 0, across, down), (across, 0, width, down), (0, down, across, height), (across, down, width, height)]
    return [image.crop(box) for box in boxes]


def _fitted(width: int, height: int, shortest: int, longest: int) -> tuple[int, int]:
    """Width and height: the longer edge is cut to `longest`, then each is at least `shortest`."""
    ratio = width / height
    if width >= height and width > longest:
        width, height = longest, int(longest / ratio)
    elif height > width and height > longest:
        width, height = int(longest * ratio), longest
    return max(width, shortest), max(height, shortest)
