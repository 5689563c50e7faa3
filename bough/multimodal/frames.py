"""Frames of videos, for families that see each as a tile: which are taken, and what a request may set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.multimodal.processor import Options, VideoInfo, bounded_count, bounded_number

FRAME_OPTIONS: Final = frozenset({"fps", "num_frames", "max_frames"})
"""What a request may set for videos."""
OF_VIDEOS: Final = FRAME_OPTIONS | {"min_frames"}
"""Settings that a request may send for all of its media, though images have no use for them."""
_USUAL: Final = 32
"""Frames of a video, where neither the request nor the checkpoint says."""
MOST_FRAMES: Final = 10_000
"""Of a video, that a request may ask for."""
_ONES: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS: Final = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def video_fields(config: Fields) -> Fields:
    """The settings of the checkpoint's video processor; where it has none, those for images."""
    has_own = config.inner("processor_config").has("video_processor")
    return processor_fields(config, "video_processor" if has_own else "image_processor")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRules:
    """How many frames of a video are taken."""

    num_frames: int
    fps: float = 0.0
    """Frames a second, at most `num_frames`; 0: always `num_frames`."""

    @classmethod
    def of(cls, config: Fields) -> FrameRules:
        settings = video_fields(config)
        if settings.has("num_frames") or not settings.has("fps"):
            return cls(num_frames=settings.count("num_frames", default=_USUAL))
        return cls(num_frames=MOST_FRAMES, fps=settings.positive("fps"))

    def count(self, info: VideoInfo, options: Options) -> int:
        """As many as a request wants, or the checkpoint, and no more than there are."""
        wanted, fps = int(options.get("num_frames", self.num_frames)), float(options.get("fps", self.fps))
        if fps and "num_frames" not in options:
            wanted = min(int(info.total / info.fps * fps), wanted if "fps" not in options else MOST_FRAMES)
        return max(1, min(wanted, int(options.get("max_frames", MOST_FRAMES)), info.total))

    def evenly(self, info: VideoInfo, options: Options) -> list[int]:
        """The first frames of equal parts of the video."""
        count = self.count(info, options)
        return [number * info.total // count for number in range(count)]

    def middles(self, info: VideoInfo, options: Options) -> list[int]:
        """The frames in the middle of equal parts of the video."""
        step = info.total / self.count(info, options)
        return [int((number + 0.5) * step) for number in range(self.count(info, options))]


def frame_option(name: str, value: Any) -> int | float:
    """A setting of a request, one of `FRAME_OPTIONS`. Raises `InvalidRequest`."""
    return bounded_number(name, value, 0.01, 120.0) if name == "fps" else bounded_count(name, value, 1, MOST_FRAMES)


def number_in_words(number: int) -> str:
    """Of a number below a million, in English."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % unit
    between = "" if not rest else " and " if rest < 100 else ", "
    return f"{number_in_words(number // unit)} {name}{between}{number_in_words(rest) if rest else ''}"
