"""Images cut into tiles on a canvas of one of several sizes (LLaVA-NeXT and OneVision): the sizes, and what remains of
the canvas without its margins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from bough.config.fields import Fields
from bough.core.errors import ConfigError

NEXT: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION: Final = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
_SHRUNK_ABOVE: Final = 1.1


def canvases(config: Fields, default: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(height, width) of each canvas. Raises `ConfigError`."""
    given = config.any("image_grid_pinpoints")
    if given is None:
        return tuple(default)
    if not isinstance(given, list) or not all(
        isinstance(each, list) and len(each) == 2 and all(isinstance(edge, int) and edge > 0 for edge in each)
        for each in given
    ):
        raise ConfigError(what="image_grid_pinpoints is no list of sizes", fix="check config.json")
    return tuple((height, width) for height, width in given)


def best_canvas(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The canvas that keeps most of an image's pixels; among equals, the one that wastes the fewest."""
    best, most, least = sizes[0], 0, float("inf")
    for rows, columns in sizes:
        scale = min(columns / width, rows / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        wasted = rows * columns - shown
        if shown > most or (shown == most and wasted < least):
            best, most, least = (rows, columns), shown, wasted
    return best


def margins(rows: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """Rows above and below, and columns on both sides, that hold nothing of an image: `rows` and `columns` of its canvas."""
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


def shrunk(rows: int, columns: int, side: int, most_tiles: int) -> tuple[int, int]:
    """Rows and columns of features, if there are many more than those of `most_tiles` tiles of `side x side`; 0: any."""
    if not most_tiles:
        return rows, columns
    ratio = math.sqrt(rows * columns / (most_tiles * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > _SHRUNK_ABOVE else (rows, columns)


def most_tiles(config: Fields) -> int:
    """Of OneVision's features: as `vision_aspect_ratio` says."""
    word = str(config.any("vision_aspect_ratio") or "anyres_max_9")
    number = word.removeprefix("anyres_max_")
    return int(number) if number.isdigit() else 0
