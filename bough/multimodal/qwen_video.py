"""Which frames of a video Qwen's models see, how large, and when: numbers of qwen-vl-utils (2 and 2.5) and of transformers'
processor (3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bough.config.fields import Fields
from bough.config.image_facts import image_facts
from bough.multimodal.processor import Options, VideoInfo
from bough.multimodal.qwen_sizes import resized

FRAME_FACTOR: Final = 2
_USED: Final = 0.9
"""Of the tokens that a video may have, how much its frames may use..."""
_SLACK: Final = 1.05
"""...and by how much the most pixels of a frame are above the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """A family's."""

    whole: bool
    """Bounds of pixels are those of all frames together (Qwen3-VL); otherwise those of one."""
    least: int
    most: int
    fps: float
    min_frames: int
    max_frames: int
    capped: bool
    """A frame has at most an even part of the video's tokens."""
    tokens: int
    """Of the video; where bounds are of all frames, of one frame."""
    factor: int
    """Pixels along a side of a position."""

    @classmethod
    def of(cls, settings: Fields, *, whole: bool, factor: int, bounds: tuple[int, int] | None = None) -> VideoRules:
        """The settings of the checkpoint's video processor over the family's own. `bounds`: least and most pixels, if not
        Qwen's."""
        facts = image_facts(settings)
        least, most = bounds or (128 * factor**2, 768 * factor**2)
        return cls(
            whole=whole,
            least=settings.count("min_pixels", default=facts.edge("shortest_edge", least)),
            most=settings.count("max_pixels", default=facts.edge("longest_edge", most)),
            fps=settings.number("fps", default=2.0),
            min_frames=settings.count("min_frames", default=4),
            max_frames=settings.count("max_frames", default=768),
            capped=settings.flag("cap_pixels_per_frame", default=not whole),
            tokens=settings.count("max_video_tokens", default=768 if whole else 128_000),
            factor=factor,
        )

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        """Frames at even distances, as many as seconds and rate say, within bounds."""
        most = min(int(options.get("max_frames", self.max_frames)), info.total)
        least = int(options.get("min_frames", self.min_frames))
        if "num_frames" in options:
            count = float(options["num_frames"])
            count = round(count / FRAME_FACTOR) * FRAME_FACTOR if not self.whole else count
        else:
            count = info.total / info.fps * float(options.get("fps", self.fps))
            if self.whole:
                count = max(int(count), least)
            else:
                least = math.ceil(least / FRAME_FACTOR) * FRAME_FACTOR
                count = max(count, least)
        count = min(count, most)
        if not self.whole and count >= FRAME_FACTOR:
            count = math.floor(count / FRAME_FACTOR) * FRAME_FACTOR
        frames: list[int] = np.linspace(0, info.total - 1, max(1, int(count))).round().astype(int).tolist()
        return frames

    def frame_size(self, info: VideoInfo, num_frames: int, options: Options) -> tuple[int, int]:
        """Height and width of each frame."""
        least, most = int(options.get("min_pixels", self.least)), int(options.get("max_pixels", self.most))
        if self.whole:
            return self._of_whole(info, num_frames, least, most)
        if self.capped:
            budget = int(self.tokens * self.factor**2 * _USED)
            most = max(min(most, budget * FRAME_FACTOR // num_frames), int(least * _SLACK))
        return resized(info.height, info.width, self.factor, min(least, most), most)

    def _of_whole(self, info: VideoInfo, num_frames: int, least: int, most: int) -> tuple[int, int]:
        factor, height, width = self.factor, info.height, info.width
        if self.capped:
            most = max(min(self.tokens * factor**2, most // num_frames), int(least * _SLACK)) * num_frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        # a lone frame counts as one here, and is shown twice
        counted = max(round(num_frames / FRAME_FACTOR) * FRAME_FACTOR, FRAME_FACTOR)
        return resized(height, width, factor, least, most, counted=counted, frames=num_frames)


def timestamps(indices: Sequence[int], fps: float) -> list[float]:
    """Seconds of each pair of frames: halfway between them. A last one without a partner is its own."""
    at = [index / fps for index in indices]
    if len(at) % FRAME_FACTOR:
        at.append(at[-1])
    return [(at[pair] + at[pair + 1]) / 2 for pair in range(0, len(at), FRAME_FACTOR)]
