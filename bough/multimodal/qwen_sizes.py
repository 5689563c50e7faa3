"""How images and frames are resized for models that keep their shapes (Qwen)."""

from __future__ import annotations

import math

from bough.multimodal.errors import MediaError

_MOST_STRETCHED = 200
"""Of an image's sides, how much longer one may be than the other."""


def resized(
    height: int, width: int, factor: int, least: int, most: int, *, counted: int = 1, frames: int = 1
) -> tuple[int, int]:
    """Height and width that are multiples of `factor`, nearest to the given shape, of `least` to `most` pixels in all of
    `frames` frames, of which `counted` are counted first. Raises `MediaError` for what is too long and thin."""
    if max(height, width) > _MOST_STRETCHED * min(height, width):
        raise MediaError(
            what=f"the image has {width} x {height} pixels",
            why=f"one side may be at most {_MOST_STRETCHED} times the other",
            fix="cut it",
        )
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if counted * high * wide > most:
        shrink = math.sqrt(frames * height * width / most)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if counted * high * wide < least:
        grow = math.sqrt(least / (frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return high, wide
