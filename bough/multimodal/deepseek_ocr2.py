"""Images for DeepSeek-OCR 2: tiles in the shape that is nearest to the image's, and the whole image on grey behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.deepseek_ocr2 import read_ocr2
from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.core.media import MediaKind
from bough.multimodal.internvl import canvas, cut
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
from bough.multimodal.tiles import image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class Ocr2Processor(Processor):
    """An image with its tiles is one item. Its grid is the number of tiles and the edge of the whole image."""

    kinds = frozenset({"image"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_ocr2(config)
        self.token = image_token(config)
        given = processor_fields(config).numbers("background_color") or (127, 127, 127)
        self.ground = tuple(int(each) for each in given)

    @property
    def identity(self) -> str:
        facts = self.facts
        sizes = [facts.sam.patch, facts.whole, facts.tile, facts.least, facts.most]
        return json.dumps(["deepseek-ocr2-1", *sizes, *self.ground, facts.image.resample])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        for name, value in given.items():
            if name != "max_patches":
                raise unknown_option(name, ["max_patches"])
            if value is not None:
                checked[name] = bounded_count(name, value, 1, self.facts.most)
        return checked

    def little_detail(self) -> Options:
        return {"max_patches": 1}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        from PIL import Image as Pictures

        facts = self.facts
        most = int(options.get("max_patches", facts.most))
        edge = facts.whole if most > 1 else facts.tile
        squares: list[Image] = []
        if most > 1 and max(image.size) > facts.tile:
            columns, rows = canvas(*image.size, facts.tile, min(facts.least, most), most)
            squares = cut(image.resize((columns * facts.tile, rows * facts.tile), facts.image.resample), facts.tile)
        tiles, scale = len(squares), edge / max(image.size)
        whole = image.resize(tuple(max(1, round(each * scale)) for each in image.size), facts.image.resample)  # type: ignore[arg-type]
        ground = Pictures.new("RGB", (edge, edge), self.ground)
        ground.paste(whole, ((edge - whole.width) // 2, (edge - whole.height) // 2))
        pixels = np.concatenate([np.asarray(square).reshape(-1, 3) for square in (*squares, ground)])
        cost = tiles * facts.tokens(facts.tile) + facts.tokens(edge)
        return pixels, (ItemShape((tiles, edge), facts.positions(tiles, edge), cost),)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(0, processed.items[0].count)]
