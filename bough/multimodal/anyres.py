"""Images for LLaVA-NeXT and LLaVA-OneVision: the whole image, and tiles of it within a canvas that suits its shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.anyres import best_canvas, canvases, margins, most_tiles, shrunk
from bough.config.fields import Fields
from bough.config.image_facts import image_facts, processor_fields
from bough.config.vit import anyres_vit, is_onevision, usual_canvases
from bough.core.media import MediaKind
from bough.multimodal.frames import FrameRules
from bough.multimodal.internvl import cut
from bough.multimodal.processor import ItemShape, Marker, Options
from bough.multimodal.tiles import TileProcessor, image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class AnyresProcessor(TileProcessor):
    """Every patch that shows something is a position, and there is one behind each row."""

    def __init__(self, config: Fields) -> None:
        vit = anyres_vit(config)
        facts = image_facts(processor_fields(config))
        super().__init__(patches=vit.tokens, positions=vit.side**2, facts=facts, token=image_token(config))
        self.side, self.along = vit.side * vit.patch, vit.side
        self.sizes = canvases(config, usual_canvases(config))
        self.alone = is_onevision(config)
        """Only an image that is alone in its request is cut."""
        self.most = most_tiles(config) if self.alone else 0
        self.bounds = {"max_dynamic_patch": 1} if self.alone else {}
        if self.alone:
            self.kinds = frozenset({"image", "video"})
            self.rules = FrameRules.of(config)
            self.video_id = config.count("video_token_id", "video_token_index", default=151_647)

    def settings(self) -> Sequence[Any]:
        return (self.side, self.sizes, self.most, self.facts.resample, self.facts.mean, str(self.rules))

    def among(self, kind: MediaKind, count: int) -> Options:
        return {"max_dynamic_patch": 1} if self.alone and count > 1 else {}

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        whole = (self.side, self.side)
        if "max_dynamic_patch" in options:
            return [self._squared(image).resize(whole, self.facts.resample)], (0, 0)
        height, width = best_canvas(image.height, image.width, self.sizes)
        large = _fitted(image, height, width, self.facts.resample)
        tiles = [image.resize(whole, self.facts.resample), *cut(large, self.side)]
        return tiles, (height // self.side, width // self.side)

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        tiles, (rows, columns) = self.tiles(image, options)
        count = self.positions_of_tile + 1
        if rows:
            count = self.positions_of_tile + self._canvas_positions(rows, columns, image.height, image.width)
        grid = (len(tiles), rows, columns, image.height, image.width)
        pixels = np.stack([np.asarray(tile) for tile in tiles])
        return pixels, (ItemShape(grid, count, len(tiles) * self.patches),)

    def frame_items(self, count: int) -> tuple[ItemShape, ...]:
        """Squares of four patches are positions; there is one more behind the last frame. A grid is (1, whether it is)."""
        positions = (-(-self.along // 2)) ** 2
        return tuple(
            ItemShape(
                (1, int(number == count - 1)), positions + (number == count - 1), self.patches, number, number + 1
            )
            for number in range(count)
        )

    def marker(self, kind: MediaKind) -> Marker:
        return super().marker(kind) if kind == "image" else Marker((self.video_id,), (self.video_id,), self.video_id)

    def _canvas_positions(self, rows: int, columns: int, height: int, width: int) -> int:
        high, wide = rows * self.along, columns * self.along
        above, beside = margins(high, wide, height, width)
        high, wide = shrunk(high - 2 * above, wide - 2 * beside, self.along, self.most)
        return high * (wide + 1)

    def _squared(self, image: Image) -> Image:
        """In the middle of a square, in the colour that normalises to nothing."""
        from PIL import Image as Pictures

        side = max(image.size)
        colour = tuple(int(each * 255) for each in self.facts.mean)
        square = Pictures.new("RGB", (side, side), colour)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square


def _fitted(image: Image, height: int, width: int, resample: int) -> Image:
    """As large as it can be within a canvas, in the middle; the rest is black."""
    from PIL import Image as Pictures

    if width / image.width < height / image.height:
        size = (width, min(math.ceil(image.height * (width / image.width)), height))
    else:
        size = (min(math.ceil(image.width * (height / image.height)), width), height)
    canvas = Pictures.new("RGB", (width, height))
    canvas.paste(image.resize(size, resample), ((width - size[0]) // 2, (height - size[1]) // 2))
    return canvas
