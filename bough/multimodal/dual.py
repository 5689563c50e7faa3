"""Images for models that embed an image by itself: CLIP, SigLIP, SigLIP 2. Each image is a prompt of one position."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.vit import clip_vit, siglip2_naflex, siglip_vit
from bough.core.media import MediaKind
from bough.multimodal.llava import centre_crop, shortest_edge
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
from bough.multimodal.tiles import TileProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

_TOKEN: Final = 0
"""What an image's prompt consists of. Any id of the vocabulary will do: nothing of it reaches the image's vector."""


class ClipProcessor(TileProcessor):
    """The shorter edge to a size, and the middle of it."""

    def __init__(self, config: Fields) -> None:
        vit = clip_vit(config)
        super().__init__(patches=vit.tokens, positions=1, facts=vit.image, token=_TOKEN)
        self.side = vit.side * vit.patch
        self.edge = vit.image.edge("shortest_edge", self.side)
        self.crops = processor_fields(config).flag("do_center_crop", default=True)

    def settings(self) -> Sequence[Any]:
        return (self.side, self.edge, self.crops, self.facts.resample)

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        filter_ = self.facts.resample
        if not self.crops:
            return [image.resize((self.side, self.side), filter_)], (0, 0)
        return [centre_crop(shortest_edge(image, self.edge, filter_), self.side)], (0, 0)


class SiglipProcessor(TileProcessor):
    """Every image to one square."""

    def __init__(self, config: Fields) -> None:
        vit = siglip_vit(config)
        super().__init__(patches=vit.tokens, positions=1, facts=vit.image, token=_TOKEN)
        self.side = vit.side * vit.patch

    def settings(self) -> Sequence[Any]:
        return (self.side, self.facts.resample)

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        return [image.resize((self.side, self.side), self.facts.resample)], (0, 0)


class NaflexProcessor(Processor):
    """Every image to as many patches as may be, near its own shape."""

    kinds = frozenset({"image"})

    def __init__(self, config: Fields) -> None:
        self.facts = siglip2_naflex(config)

    @property
    def identity(self) -> str:
        return json.dumps(["naflex-1", self.facts.patch, self.facts.most_patches, self.facts.image.resample])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        for name, value in given.items():
            if name != "max_num_patches":
                raise unknown_option(name, ["max_num_patches"])
            if value is not None:
                checked[name] = bounded_count(name, value, 1, self.facts.most_patches)
        return checked

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        patch = self.facts.patch
        most = int(options.get("max_num_patches", self.facts.most_patches))
        rows, columns = fitted_grid(image.height, image.width, patch, most)
        resized = image.resize((columns * patch, rows * patch), self.facts.image.resample)
        return np.asarray(resized), (ItemShape((rows, columns), 1, rows * columns),)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((_TOKEN,), (_TOKEN,), _TOKEN)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]


_SCALES: Final = (1e-6, 100.0)
_NEAR: Final = 1e-5
"""Where halving the range of scales ends: that of the family's own processor, so that grids are the same."""


def fitted_grid(height: int, width: int, patch: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches: those of the largest scale of which there are at most `most`, found by halving."""

    def along(size: int, scale: float) -> int:
        return max(1, math.ceil(size * scale / patch))

    low, high = _SCALES
    while high - low >= _NEAR:
        scale = (low + high) / 2
        if along(height, scale) * along(width, scale) <= most:
            low = scale
        else:
            high = scale
    return along(height, low), along(width, low)
