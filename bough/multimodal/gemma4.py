"""Images for Gemma 4: as large as their positions allow, in their own shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.gemma4_vision import BUDGETS, read_gemma4_vision
from bough.core.errors import InvalidRequest
from bough.core.media import MediaKind
from bough.multimodal.errors import MediaError
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    Token,
    unknown_option,
)
from bough.multimodal.tiles import image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class Gemma4Processor(Processor):
    """Squares of patches are positions. An item's grid is rows and columns of patches."""

    kinds = frozenset({"image"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_gemma4_vision(config)
        self.token = image_token(config)
        self.start_id = config.count("boi_token_id", default=255_999)
        self.end_id = config.count("eoi_token_id", default=258_882)

    @property
    def identity(self) -> str:
        facts = self.facts
        return json.dumps(["gemma4-1", facts.patch, facts.pool, facts.most, facts.image.resample])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        allowed = [each for each in BUDGETS if each <= self.facts.most]
        for name, value in given.items():
            if name != "max_soft_tokens":
                raise unknown_option(name, ["max_soft_tokens"])
            if value is not None and (isinstance(value, bool) or value not in allowed):
                raise InvalidRequest(
                    what=f"max_soft_tokens is {str(value)[:40]!r}",
                    why=f"it must be one of {', '.join(map(str, allowed))}",
                    fix="send one of them, or leave it out",
                    param="mm_processor_kwargs",
                )
            if value is not None:
                checked[name] = value
        return checked

    def little_detail(self) -> Options:
        return {"max_soft_tokens": min(BUDGETS[0], self.facts.most)}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        rows, columns = self._positions(image.size, int(options.get("max_soft_tokens", self.facts.most)))
        size, by = (columns * self.facts.unit, rows * self.facts.unit), self.facts.pool
        pixels = np.asarray(image if image.size == size else image.resize(size, self.facts.image.resample))[None]
        grid = (rows * by, columns * by)
        return pixels, (ItemShape(grid, rows * columns, math.prod(grid)),)

    def _positions(self, size: tuple[int, int], most: int) -> tuple[int, int]:
        """Rows and columns of positions: as many as fit into `most` of them in the image's shape."""
        width, height = size
        factor = math.sqrt(most * self.facts.unit**2 / (height * width))
        rows, columns = (math.floor(factor * edge / self.facts.unit) for edge in (height, width))
        if not rows and not columns:
            raise MediaError(what="an image has no position", why="its shape leaves none", fix="send another image")
        if not rows:
            return 1, min(width // height, most)
        if not columns:
            return min(height // width, most), 1
        return rows, columns

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        runs = [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]
        return [Token(self.start_id), *runs, Token(self.end_id)]
