"""Images for LFM2-VL: near their own shapes, or if they are large cut into tiles with the whole image behind them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.lfm2_vl import read_lfm2_vl
from bough.core.media import MediaKind
from bough.multimodal.errors import MediaError
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
from bough.multimodal.tiles import image_token, patches_of

if TYPE_CHECKING:
    from PIL.Image import Image


class Lfm2VlProcessor(Processor):
    """Tiles and the whole image are items. An item's grid is rows and columns of patches, and those of the image's tiles (1
    and 1: it is not cut)."""

    kinds = frozenset({"image"})

    def __init__(self, config: Fields) -> None:
        settings = processor_fields(config)
        self.facts = read_lfm2_vl(config)
        self.token = image_token(config)
        self.cuts = settings.flag("do_image_splitting", default=True)
        self.least = settings.count("min_tiles", default=2)
        self.most = settings.count("max_tiles", default=10)
        self.whole = settings.flag("use_thumbnail", default=True)
        """Whether the image as a whole stands behind its tiles."""
        self.tolerance = settings.positive("max_pixels_tolerance", default=2.0)
        """How much larger than the largest image an image may be without being cut."""
        self.marks = config.inner("processor_config").flag("use_image_special_tokens", default=True)

    @property
    def identity(self) -> str:
        facts = self.facts
        bounds = [facts.tile, facts.least_positions, facts.most_positions, self.least, self.most, self.tolerance]
        return json.dumps(["lfm2-vl-1", facts.unit, facts.by, *bounds, self.cuts, self.whole, facts.vit.image.resample])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked: Options = {}
        for name, value in given.items():
            if name != "max_tiles":
                raise unknown_option(name, ["max_tiles"])
            if value is not None:
                checked[name] = bounded_count(name, value, 1, self.most)
        return checked

    def little_detail(self) -> Options:
        return {"max_tiles": 1}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        filter_ = self.facts.vit.image.resample
        columns, rows = self._tiles(image, int(options.get("max_tiles", self.most)))
        parts = []
        if rows * columns > 1:
            side = self.facts.tile
            parts = cut(image.resize((columns * side, rows * side), filter_), side)
        if self.whole or not parts:
            parts.append(image.resize(self._fitted(image), filter_))
        patches = [patches_of(np.asarray(part), self.facts.vit.patch) for part in parts]
        items, first = [], 0
        for part, own in zip(parts, patches, strict=True):
            grid = (part.height // self.facts.vit.patch, part.width // self.facts.vit.patch, rows, columns)
            last = first + len(own)
            items.append(ItemShape(grid, len(own) // self.facts.by**2, len(own), first, last))
            first = last
        return np.concatenate(patches), tuple(items)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.token,), (self.token,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        runs = [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]
        if not self.marks:
            return runs
        made: list[Piece] = []
        _, _, rows, columns = processed.items[0].grid
        for number, run in enumerate(runs):
            row, column = divmod(number, columns)
            mark = f"<|img_row_{row + 1}_col_{column + 1}|>" if row < rows else "<|img_thumbnail|>"
            made += [mark, run] if rows * columns > 1 else [run]
        return ["<|image_start|>", *made, "<|image_end|>"]

    def _tiles(self, image: Image, most: int) -> tuple[int, int]:
        """Columns and rows of tiles; 1 and 1: the image is not cut."""
        facts = self.facts
        area = math.prod(max(facts.vit.patch, _nearest(edge, facts.unit)) for edge in image.size)
        large = area > facts.most_positions * facts.unit**2 * self.tolerance
        if not self.cuts or most == 1 or not large:
            return 1, 1
        return canvas(*image.size, facts.tile, min(self.least, most), most)

    def _fitted(self, image: Image) -> tuple[int, int]:
        """Width and height as multiples of a position's edge, within the bounds."""
        facts = self.facts
        unit, (width, height) = facts.unit, image.size
        least, most = (count * unit * unit for count in (facts.least_positions, facts.most_positions))
        wide, high = (max(unit, _nearest(edge, unit)) for edge in (width, height))
        if wide * high > most:
            shrink = math.sqrt(height * width / most)
            wide, high = (max(unit, math.floor(edge / shrink / unit) * unit) for edge in (width, height))
        elif wide * high < least:
            grow = math.sqrt(least / (height * width))
            wide, high = (math.ceil(edge * grow / unit) * unit for edge in (width, height))
        if wide * high > most:
            raise MediaError(
                what=f"the image has {width} x {height} pixels", why="it is too long and thin", fix="cut it"
            )
        return wide, high


def _nearest(length: int, step: int) -> int:
    return round(length / step) * step
