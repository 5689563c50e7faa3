"""Settings of image processors under one set of names, read by processors and by encoders that normalise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bough.config.fields import Fields

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
HALF: Final = (0.5, 0.5, 0.5)
BICUBIC: Final = 3
"""Pillow's number of the resampling filter, which configs use."""

PIXELS: Final = (56 * 56, 28 * 28 * 1280)
"""Minimum and maximum pixels of a resized image: defaults of the processor's class (Qwen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """How pixels are scaled and normalised."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    """Factor applied to pixel values of 0 to 255."""
    resample: int
    """Pillow's number of the filter that images are resized with."""
    size: tuple[tuple[str, int], ...]
    """The config's `size`."""

    def edge(self, name: str, default: int) -> int:
        return dict(self.size).get(name, default)


def processor_fields(config: Fields, part: str = "image_processor") -> Fields:
    """The settings of a part of the checkpoint's processor; empty ones where it has none."""
    return config.inner("processor_config").inner(part)


def image_facts(
    settings: Fields,
    *,
    mean: tuple[float, ...] = CLIP_MEAN,
    std: tuple[float, ...] = CLIP_STD,
    resample: int = BICUBIC,
) -> ImageFacts:
    """The settings of an image processor; the arguments are the family's defaults."""
    rescales, normalises = settings.flag("do_rescale", default=True), settings.flag("do_normalize", default=True)
    given_mean, given_std = settings.numbers("image_mean"), settings.numbers("image_std")
    size: Any = settings.any("size")
    pairs = sorted(size.items()) if isinstance(size, dict) else []
    return ImageFacts(
        mean=(given_mean or mean) if normalises else (0.0, 0.0, 0.0),
        std=(given_std or std) if normalises else (1.0, 1.0, 1.0),
        rescale=settings.number("rescale_factor", default=1 / 255) if rescales else 1.0,
        resample=int(settings.number("resample", default=resample)),
        size=tuple((str(name), int(value)) for name, value in pairs if value is not None),
    )


def pixel_bounds(settings: Fields) -> tuple[int, int]:
    """Minimum and maximum pixels of a resized image, for processors that keep images near their original size
    (Qwen)."""
    facts = image_facts(settings)
    least, most = facts.edge("shortest_edge", PIXELS[0]), facts.edge("longest_edge", PIXELS[1])
    return settings.count("min_pixels", default=least), settings.count("max_pixels", default=most)
