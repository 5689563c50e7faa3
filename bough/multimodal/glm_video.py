"""Which frames of a video GLM's models see, and what is written behind each pair of them: by the rules of GLM-4.1V and 4.5V,
or by those of GLM-4.6V."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.multimodal.frames import video_fields
from bough.multimodal.processor import Options, VideoInfo
from bough.multimodal.qwen_video import FRAME_FACTOR, VideoRules

_LEAST: Final = 112 * 112
_MOST: Final = 28 * 28 * 2 * 30_000
_RATES: Final = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Of GLM-4.6V: (length of a video in seconds at most, pairs of frames a second)."""
_MOST_FRAMES: Final = 640
"""Of GLM-4.6V."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmVideoRules:
    """Sizes are Qwen3-VL's; a frame has at most as many pixels as an image (`frame_pixels`)."""

    sizes: VideoRules
    frame_pixels: int
    later: bool
    """GLM-4.6V."""
    max_duration: float
    """Seconds; of longer videos as many frames are taken as of such a one."""

    @classmethod
    def of(cls, config: Fields, *, factor: int, frame_pixels: int) -> GlmVideoRules:
        settings, images = video_fields(config), processor_fields(config)
        names = [config.any("model_type"), settings.any("video_processor_type"), images.any("processor_class")]
        names += [images.any("image_processor_type"), config.inner("processor_config").any("processor_class")]
        return cls(
            sizes=VideoRules.of(settings, whole=True, factor=factor, bounds=(_LEAST, _MOST)),
            frame_pixels=frame_pixels,
            later=any(str(name).lower().startswith("glm46v") for name in names),
            max_duration=settings.positive("max_duration", default=300.0),
        )

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        """An even number of frames; the last one may be there twice."""
        seconds = info.total / info.fps
        if "num_frames" in options:
            taken = _spread(0, info.total - 1, int(options["num_frames"]))
        elif self.later and "fps" not in options:
            taken = _at_changing_rates(info, seconds)
        else:
            taken = self._at_one_rate(info, seconds, options)
        if len(taken) > int(options.get("max_frames", len(taken))):
            taken = [taken[at] for at in _spread(0, len(taken) - 1, int(options["max_frames"]))]
        taken = list(dict.fromkeys(taken))
        return [*taken, taken[-1]] if len(taken) % FRAME_FACTOR else taken

    def _at_one_rate(self, info: VideoInfo, seconds: float, options: Options) -> list[int]:
        fps, last = float(options.get("fps", self.sizes.fps)), info.total - 1
        if seconds <= self.max_duration:
            count = max(math.floor(seconds * fps), 1)
            return [min(last, math.ceil(number * info.fps / fps)) for number in range(count)]
        count = int(self.max_duration * fps)
        if count >= info.total:
            return list(range(info.total))
        return [min(last, math.ceil(at * info.fps)) for at in np.linspace(0, seconds, count).tolist()]

    def frame_size(self, info: VideoInfo, num_frames: int, options: Options) -> tuple[int, int]:
        """Height and width of each frame."""
        most = min(int(options.get("max_pixels", self.sizes.most)), self.frame_pixels * max(num_frames, FRAME_FACTOR))
        return self.sizes.frame_size(info, num_frames, {**options, "max_pixels": most})

    def notes(self, indices: Sequence[int], fps: float) -> tuple[str, ...]:
        """What is written behind each pair: when its first frame is shown."""
        seconds = [index / fps for index in indices[::FRAME_FACTOR]]
        return tuple(f"{each:.1f} seconds" if self.later else str(int(each)) for each in seconds)


def _at_changing_rates(info: VideoInfo, seconds: float) -> list[int]:
    """Long videos have fewer frames a second."""
    shown = min(seconds, _RATES[-1][0])
    rate = next(rate for most, rate in _RATES if shown <= most) * FRAME_FACTOR
    count = min(int(shown * rate), _MOST_FRAMES)
    taken: list[int] = []
    if info.total >= count:
        at, step = 0.0, 1 / rate
        for index in range(info.total):
            if index * (1 / info.fps) >= at:
                at += step
                taken.append(index)
                if at >= int(seconds):
                    break
    first, last = (taken[0], taken[-1]) if taken and len(taken) < count else (0, info.total - 1)
    if len(taken) != count:
        taken = _spread(first, last, count)
    return taken or [0]


def _spread(first: int, last: int, count: int) -> list[int]:
    """`count` whole numbers at even distances."""
    found: list[int] = np.linspace(first, last, count, dtype=int).tolist()
    return found
