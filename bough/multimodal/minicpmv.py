"""Images for MiniCPM-V 4.6: the whole image, and slices of it if it is large, near their own shapes, with its number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.minicpmv import read_minicpmv
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
    bounded_count,
    unknown_option,
)
from bough.multimodal.tiles import image_token, patches_of

if TYPE_CHECKING:
    from PIL.Image import Image


class MiniCpmProcessor(Processor):
    """The whole image and each slice are items. An item's grid is rows and columns of patches, and those of slices (0 and
    0: there are none)."""

    kinds = frozenset({"image"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_minicpmv(config)
        self.unit = self.facts.by * self.facts.vit.patch
        self.numbers = processor_fields(config).flag("use_image_id", default=True)
        self.token = image_token(config)

    @property
    def identity(self) -> str:
        facts = self.facts
        return json.dumps(["minicpmv-1", self.unit, facts.by, facts.resolution, facts.slices, facts.vit.image.resample])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        for name, value in given.items():
            if name != "max_slice_nums":
                raise unknown_option(name, ["max_slice_nums"])
            if value is not None:
                checked[name] = bounded_count(name, value, 1, self.facts.slices)
        return checked

    def little_detail(self) -> Options:
        return {"max_slice_nums": 1}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        width, height = image.size
        edge, filter_ = self.facts.resolution, self.facts.vit.image.resample
        rows, columns = slices(height, width, edge, int(options.get("max_slice_nums", self.facts.slices)))
        high, wide = self._fitted(height, width, enlarge=not rows)
        parts = [image.resize((wide, high), filter_)]
        if rows:
            high, wide = self._fitted(_nearest(height, rows) / rows, _nearest(width, columns) / columns, enlarge=True)
            large = image.resize((wide * columns, high * rows), filter_)
            boxes = [(column * wide, row * high) for row in range(rows) for column in range(columns)]
            parts += [large.crop((left, top, left + wide, top + high)) for left, top in boxes]
        patches = [patches_of(np.asarray(part), self.facts.vit.patch) for part in parts]
        items, first = [], 0
        for part, own in zip(parts, patches, strict=True):
            grid = (part.height // self.facts.vit.patch, part.width // self.facts.vit.patch, rows, columns)
            count = len(own) // self.facts.by**2
            if count > self.facts.max_positions:
                raise MediaError(
                    what=f"the image has {width} x {height} pixels", why="it is too long and thin", fix="cut it"
                )
            items.append(ItemShape(grid, count, len(own), first, first + len(own)))
            first += len(own)
        return np.concatenate(patches), tuple(items)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def prefix(self, kind: MediaKind, number: int) -> Sequence[Piece]:
        return [f"<image_id>{number}</image_id>"] if self.numbers else []

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        whole, *rest = (PlaceholderRun(number, item.count) for number, item in enumerate(processed.items))
        made: list[Piece] = ["<image>", whole, "</image>"]
        _, _, _, columns = processed.items[0].grid
        for number, run in enumerate(rest):
            made += ["\n" if number and number % columns == 0 else "", "<slice>", run, "</slice>"]
        return [piece for piece in made if piece]

    def _fitted(self, height: float, width: float, *, enlarge: bool) -> tuple[int, int]:
        """Height and width as multiples of a position's pixels; as many pixels as a slice has, if there are more."""
        edge = self.facts.resolution
        if height * width > edge * edge or enlarge:
            ratio = width / height
            height = int(edge / math.sqrt(ratio))
            width = int(height * ratio)
        return _nearest(height, self.unit), _nearest(width, self.unit)


def slices(height: int, width: int, edge: int, most: int) -> tuple[int, int]:
    """Rows and columns of about as many slices as squares of `edge` fit into the image, in the shape that is nearest to its
    own; 0 and 0: it is not cut."""
    count = min(math.ceil(width * height / (edge * edge)), most)
    if count <= 1:
        return 0, 0
    best, least = (1, 1), math.inf
    for number in (count - 1, count, count + 1):
        if number == 1 or number > most:
            continue
        for rows in range(1, number + 1):
            if number % rows:
                continue
            error = abs(math.log(width / height) - math.log(number // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, number // rows), error
    return best


def _nearest(length: float, step: int) -> int:
    """The nearest multiple, at least one."""
    return max(round(length / step) * step, step)
