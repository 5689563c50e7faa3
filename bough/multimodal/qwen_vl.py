"""Images for Qwen2-VL, Qwen2.5-VL and Qwen3-VL: resized to a multiple of a position's pixels, near their own size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import image_facts, pixel_bounds, processor_fields
from bough.core.media import MediaItem, MediaKind
from bough.core.messages import Ids
from bough.multimodal.errors import MediaError
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    Processed,
    Processor,
    Run,
    bounded_count,
    unknown_option,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_LOW_DETAIL = 512 * 512
"""Pixels of an image of which a client wants little detail, at most."""
_MOST_STRETCHED = 200
"""Of an image's sides, how much longer one may be than the other."""


class QwenProcessor(Processor):
    """Every `merge x merge` patches are a position; an item's grid is (time, height, width) in patches."""

    kinds = frozenset({"image"})
    axes = 3

    def __init__(self, config: Fields, *, patch: int) -> None:
        """`patch`: the family's, where the processor's settings don't say."""
        settings = processor_fields(config)
        vision = config.inner("vision_config")
        self.patch = settings.count("patch_size", default=vision.count("patch_size", default=patch))
        self.merge = settings.count("merge_size", default=vision.count("spatial_merge_size", default=2))
        self.resample = image_facts(settings).resample
        self.least, self.most = pixel_bounds(settings)
        self.image_id = config.count("image_token_id")
        self.start_id = config.count("vision_start_token_id")
        self.end_id = config.count("vision_end_token_id")

    @property
    def identity(self) -> str:
        return json.dumps(["qwen-vl-1", self.patch, self.merge, self.resample, self.least, self.most])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        known = ("min_pixels", "max_pixels", "size")
        sizes = dict(given)
        size = sizes.pop("size", None)
        if isinstance(size, Mapping):
            sizes = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge"), **sizes}
        checked: Options = {}
        for name, value in sizes.items():
            if name not in known:
                raise unknown_option(name, known)
            if value is not None:
                checked[name] = bounded_count(name, value, 1, self.most)
        return checked

    def little_detail(self) -> Options:
        return {"max_pixels": min(self.most, max(self.least, _LOW_DETAIL))}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        least, most = int(options.get("min_pixels", self.least)), int(options.get("max_pixels", self.most))
        least = min(least, most)
        width, height = image.size
        height, width = resized(height, width, self.patch * self.merge, least, most)
        pixels = np.asarray(image.resize((width, height), self.resample))[None]
        grid = (1, height // self.patch, width // self.patch)
        patches = math.prod(grid)
        return pixels, (ItemShape(grid, patches // self.merge**2, patches),)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.image_id,), (self.start_id, self.image_id, self.end_id), self.image_id)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [Run(number, item.count) for number, item in enumerate(processed.items)]

    def positions(self, ids: Ids, items: Sequence[MediaItem]) -> npt.NDArray[np.int32]:
        """Text advances all axes by one a token. An item's rows and columns count from where it begins, and text goes on
        behind the largest of its positions."""
        axes = np.empty((3, len(ids)), np.int32)
        at = position = 0
        for item in items:
            axes[:, at : item.start] = np.arange(position, position + item.start - at)
            position += item.start - at
            _, h, w = item.grid[:3]
            inside = np.indices((1, h // self.merge, w // self.merge)).reshape(3, -1)
            axes[:, item.start : item.stop] = inside + position
            position += max(h, w) // self.merge
            at = item.stop
        axes[:, at:] = np.arange(position, position + len(ids) - at)
        return axes


def resized(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Height and width that are multiples of `factor`, of `least` to `most` pixels, nearest to the given shape. Raises
    `MediaError` for an image that is too long and thin."""
    if max(height, width) > _MOST_STRETCHED * min(height, width):
        raise MediaError(
            what=f"the image has {width} x {height} pixels",
            why=f"one side may be at most {_MOST_STRETCHED} times the other",
            fix="cut it",
        )
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > most:
        shrink = math.sqrt(height * width / most)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if high * wide < least:
        grow = math.sqrt(least / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return high, wide
