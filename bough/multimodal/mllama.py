"""Images for Llama 3.2 Vision: laid on a canvas of tiles that suits their shape, in its upper left corner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.mllama import read_mllama
from bough.core.media import MediaKind
from bough.multimodal.internvl import cut
from bough.multimodal.processor import ItemShape, Options, Piece, PlaceholderRun, Processed
from bough.multimodal.tiles import TileProcessor, image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class MllamaProcessor(TileProcessor):
    """Cross attention reads the tiles; a mark in the prompt says from where on."""

    def __init__(self, config: Fields) -> None:
        self.vision = read_mllama(config)
        facts = self.vision.image
        padded = self.vision.tiles * self.vision.padded
        super().__init__(patches=padded, positions=self.vision.tokens, facts=facts, token=image_token(config))
        self.side = facts.edge("height", self.vision.side * self.vision.patch)

    def settings(self) -> Sequence[Any]:
        return (self.side, self.facts.resample, self.vision.tiles)

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        from PIL import Image as Images

        rows, columns = self._shape(*image.size)
        canvas = Images.new("RGB", (columns * self.side, rows * self.side))
        size = _fitted(*image.size, canvas.width, canvas.height, self.side)
        canvas.paste(image.resize(size, self.facts.resample))
        return cut(canvas, self.side), (rows, columns)

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        pixels, (item,) = super().image(image, options)
        return pixels, (ItemShape(item.grid, item.count, self.patches),)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(number, 1) for number in range(len(processed.items))]

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the canvas that enlarges an image least or, if none does, makes it smaller least; of those the
        smallest."""
        scale = {
            (rows, columns): min(rows * self.side / height, columns * self.side / width)
            for rows, columns in self.vision.shapes
        }
        larger = [each for each in scale.values() if each >= 1]
        best = min(larger) if larger else max(scale.values())
        return min((shape for shape in scale if scale[shape] == best), key=math.prod)


def _fitted(width: int, height: int, canvas_width: int, canvas_height: int, side: int) -> tuple[int, int]:
    """An image's size within the canvas: its own, but at least that of a tile along an edge."""
    wide, high = (min(max(own, side), most) for own, most in ((width, canvas_width), (height, canvas_height)))
    if wide / width < high / height:
        return wide, min(math.floor(height * (wide / width)) or 1, high)
    return min(math.floor(width * (high / height)) or 1, wide), high
