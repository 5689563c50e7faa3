"""Images for Pixtral and Mistral 3: no larger than their longest edge may be, with a mark behind each row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.pixtral import read_pixtral
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
from bough.multimodal.tiles import image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class PixtralProcessor(Processor):
    """Squares of patches are positions. An item's grid is rows and columns of patches."""

    kinds = frozenset({"image"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_pixtral(config)
        self.token = image_token(config)
        settings = config.inner("processor_config")
        self.row_end = str(settings.any("image_break_token") or "[IMG_BREAK]")
        self.end = str(settings.any("image_end_token") or "[IMG_END]")

    @property
    def identity(self) -> str:
        facts = self.facts
        return json.dumps(["pixtral-1", facts.unit, facts.patch, facts.longest, facts.image.resample])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        for name, value in given.items():
            if name != "longest_edge":
                raise unknown_option(name, ["longest_edge"])
            if value is not None:
                checked[name] = bounded_count(name, value, 1, self.facts.longest)
        return checked

    def little_detail(self) -> Options:
        return {"longest_edge": min(512, self.facts.longest)}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        longest, unit = int(options.get("longest_edge", self.facts.longest)), self.facts.unit
        width, height = image.size
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = (max(1, -(-edge // unit)) for edge in (height, width))
        pixels = np.asarray(image.resize((columns * unit, rows * unit), self.facts.image.resample))[None]
        grid = (rows * self.facts.merge, columns * self.facts.merge)
        return pixels, (ItemShape(grid, rows * columns, math.prod(grid)),)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        made: list[Piece] = []
        for number, item in enumerate(processed.items):
            rows, columns = (edge // self.facts.merge for edge in item.grid)
            for row in range(rows):
                made += [PlaceholderRun(number, columns), self.end if row == rows - 1 else self.row_end]
        return made
