"""Images for Llama 4: tiles of a canvas that takes the image without shrinking it, if one does, and the whole image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bough.config.fields import Fields
from bough.config.image_facts import HALF, image_facts, processor_fields
from bough.config.vit import BILINEAR, llama4_vit, shuffled_by
from bough.core.media import MediaKind
from bough.multimodal.internvl import cut
from bough.multimodal.processor import Marker, Options, Piece, PlaceholderRun, Processed
from bough.multimodal.tiles import TileProcessor, image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class Llama4Processor(TileProcessor):
    """Marks stand between tiles, and before the whole image."""

    def __init__(self, config: Fields) -> None:
        vit, settings = llama4_vit(config), processor_fields(config)
        facts = image_facts(settings, mean=HALF, std=HALF, resample=BILINEAR)
        positions = (vit.side // shuffled_by(config)) ** 2
        super().__init__(patches=vit.tokens, positions=positions, facts=facts, token=image_token(config))
        self.side = vit.side * vit.patch
        self.most = settings.count("max_patches", default=16)
        self.enlarges = settings.flag("resize_to_max_canvas")
        self.bounds = {"max_patches": self.most, "max_dynamic_patch": self.most}

    def settings(self) -> Sequence[Any]:
        return (self.side, self.facts.resample, self.most, self.enlarges)

    def little_detail(self) -> Options:
        return {"max_patches": 1}

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        from PIL import Image as Pictures

        most = int(options.get("max_patches", options.get("max_dynamic_patch", self.most)))
        side, filter_ = self.side, self.facts.resample
        rows, columns = canvas(image.height, image.width, side, most, largest=self.enlarges)
        height, width = rows * side, columns * side
        if not self.enlarges:
            height, width = min(max(image.height, side), height), min(max(image.width, side), width)
        large = Pictures.new("RGB", (columns * side, rows * side))
        large.paste(image.resize(_fitted(image.width, image.height, width, height), filter_))
        if rows * columns == 1:
            return [large], (0, 0)
        return [*cut(large, side), image.resize((side, side), filter_)], (rows, columns)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker("<|image|>", "<|image|>", self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        made: list[Piece] = ["<|image_start|>"]
        for number, item in enumerate(processed.items):
            run = PlaceholderRun(number, self.positions_of_tile)
            _, rows, columns = item.grid
            for _ in range(rows):
                for column in range(columns):
                    made += [run, "<|tile_x_separator|>" if column < columns - 1 else "<|tile_y_separator|>"]
            made += ["<|image|>", run]
        return [*made, "<|image_end|>"]


def canvas(height: int, width: int, side: int, most: int, *, largest: bool) -> tuple[int, int]:
    """Rows and columns of at most `most` tiles: the canvas that enlarges the image least (`largest`: most); if all shrink
    it, the one that does least. Of those that scale it alike the smallest."""
    shapes = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    sizes = np.array(shapes, np.float32) * np.float32(side)
    scales = (sizes / np.array([height, width], np.float32)).min(1)
    enlarging = scales[scales >= 1]
    scale = scales.max() if not len(enlarging) or largest else enlarging.min()
    return min((shape for shape, each in zip(shapes, scales, strict=True) if each == scale), key=math.prod)


def _fitted(width: int, height: int, most_width: int, most_height: int) -> tuple[int, int]:
    """Width and height within bounds, in the same shape."""
    wider, higher = most_width / width, most_height / height
    if wider < higher:
        return most_width, max(1, min(math.floor(height * wider), most_height))
    return max(1, min(math.floor(width * higher), most_width)), most_height
