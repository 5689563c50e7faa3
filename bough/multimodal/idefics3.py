"""Images for Idefics 3 and SmolVLM: enlarged to the longest edge, cut into tiles, and the whole image behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bough.config.fields import Fields
from bough.config.image_facts import HALF, image_facts, processor_fields
from bough.config.vit import LANCZOS, LONGEST, idefics3_vit, is_smolvlm
from bough.core.media import MediaKind
from bough.multimodal.frames import FrameRules, number_in_words, video_fields
from bough.multimodal.internvl import cut
from bough.multimodal.processor import Marker, Options, Piece, PlaceholderRun, Processed, VideoInfo
from bough.multimodal.tiles import TileProcessor, image_token

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST: Final = 4096
"""Pixels along an edge, whatever the settings say."""
_INTRO: Final = "You are provided the following series of {count} frames from a {length} [H:MM:SS] video.\n"
"""What stands before the frames of a video."""
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class Idefics3Processor(TileProcessor):
    """Squares of patches are positions. Before each frame of a video (SmolVLM 2) stands its time."""

    def __init__(self, config: Fields) -> None:
        vit = idefics3_vit(config)
        settings = processor_fields(config)
        by = config.count("scale_factor", default=2)
        facts = image_facts(settings, mean=HALF, std=HALF, resample=LANCZOS)
        super().__init__(patches=vit.tokens, positions=(vit.side // by) ** 2, facts=facts, token=image_token(config))
        self.side = settings.inner("max_image_size").count("longest_edge", default=vit.side * vit.patch)
        self.longest = facts.edge("longest_edge", LONGEST)
        self.splits = settings.flag("do_image_splitting", default=True)
        self.bounds = {"longest_edge": self.longest}
        if is_smolvlm(config):
            self.kinds = frozenset({"image", "video"})
            self._read_videos(video_fields(config))

    def _read_videos(self, settings: Fields) -> None:
        sampling = settings.inner("video_sampling")
        self.rules = FrameRules(
            num_frames=sampling.count("max_frames", default=settings.count("num_frames", default=64)),
            fps=sampling.positive("fps", default=settings.positive("fps", default=1.0)),
        )
        edge = image_facts(settings).edge("longest_edge", LONGEST)
        self.frame_edge = min(_MOST, sampling.inner("video_size").count("longest_edge", default=edge))

    def settings(self) -> Sequence[Any]:
        videos = () if self.rules is None else (str(self.rules), self.frame_edge)
        return (self.side, self.facts.resample, self.longest, self.splits, *videos)

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        """Frames at even distances, without the first and the last second of a long video."""
        assert self.rules is not None, "the family takes videos"
        seconds = info.total / info.fps
        most, fps = int(options.get("num_frames", self.rules.num_frames)), float(options.get("fps", self.rules.fps))
        most = min(most, int(options.get("max_frames", most)))
        count = max(1, min(round(fps * seconds), most))
        start, end = 0, info.total - 1
        if seconds - 2 > most * fps:
            start, end = int(info.fps), min(int(info.total - info.fps), end)
        if start >= end:
            start, end = 0, info.total - 1
        return sorted(set(np.linspace(start, end, count, dtype=int).tolist()))

    def frame(self, image: Image) -> Image:
        return super().frame(image.resize(_fitted(*image.size, self.frame_edge), self.facts.resample))

    def notes(self, info: VideoInfo, indices: Sequence[int]) -> tuple[str, ...]:
        length = str(timedelta(seconds=int(info.total / info.fps)))
        intro = _INTRO.format(count=number_in_words(len(indices)), length=length)
        seconds = [int(index / info.fps) for index in indices]
        times = [f"\nFrame from {each // 60:02d}:{each % 60:02d}:" for each in seconds]
        return (intro + times[0], *times[1:])

    def little_detail(self) -> Options:
        return {"longest_edge": self.side}

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        longest = int(options.get("longest_edge", self.longest))
        filter_, side = self.facts.resample, self.side
        image = image.resize(_fitted(*image.size, longest), filter_)
        if not self.splits:
            return [image.resize((side, side), filter_)], (0, 0)
        image = image.resize(_in_tiles(*image.size, side), filter_)
        if image.size == (side, side):
            return [image], (0, 0)
        return [*cut(image, side), image.resize((side, side), filter_)], (image.height // side, image.width // side)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        made: list[Piece] = []
        for number, item in enumerate(processed.items):
            made += processed.notes[number : number + 1]
            _, rows, columns = item.grid
            for row in range(rows):
                for column in range(columns):
                    made += [f"{_FAKE}<row_{row + 1}_col_{column + 1}>", PlaceholderRun(number, self.positions_of_tile)]
                made.append("\n")
            if rows:
                made.append("\n")
            made += [_FAKE + _GLOBAL, PlaceholderRun(number, self.positions_of_tile), _FAKE]
        return [*made, "\n\n"] if kind == "video" else made

    def marker(self, kind: MediaKind) -> Marker:
        return super().marker(kind) if kind == "image" else Marker("<video>", "<video>", self.token)


def _fitted(width: int, height: int, longest: int) -> tuple[int, int]:
    """The longer edge is `longest`, the other an even number of pixels."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MOST:
        width, height = _MOST, int(_MOST / ratio)
    elif height > width and height > _MOST:
        width, height = int(_MOST * ratio), _MOST
    return max(width, 1), max(height, 1)


def _in_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """Both edges as multiples of a tile's, the longer one first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return width, height
