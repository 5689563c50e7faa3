"""Images and videos for Qwen2-VL, Qwen2.5-VL and Qwen3-VL: resized to multiples of a position's pixels, near their own size.

Two frames of a video are a patch in time; each such pair is an item of its own, because towers see no further."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import image_facts, pixel_bounds, processor_fields
from bough.core.media import MediaItem, MediaKind
from bough.core.messages import Ids
from bough.multimodal.embeds import embedded_grid
from bough.multimodal.frames import OF_VIDEOS
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    Token,
    VideoInfo,
    bounded_count,
    bounded_number,
    unknown_option,
)
from bough.multimodal.qwen_sizes import resized
from bough.multimodal.qwen_video import FRAME_FACTOR, VideoRules, timestamps

if TYPE_CHECKING:
    from PIL.Image import Image

_LOW_DETAIL = 512 * 512
"""Pixels of an image of which a client wants little detail, at most."""


class QwenImages(Processor):
    """Images near their own size, with positions of three axes: what GLM's models share. Every `merge x merge` patches are a
    position. An item's grid is (1, height, width) in patches."""

    kinds = frozenset({"image"})
    axes = 3
    kind: str = "2"
    patch: int
    merge: int
    resample: int
    least: int
    most: int

    def bounds(self, kind: MediaKind) -> dict[str, int]:
        """Counts that a request may set, and the most of each."""
        return {"min_pixels": self.most, "max_pixels": self.most}

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        sizes = dict(given)
        size = sizes.pop("size", None)
        if isinstance(size, Mapping):
            sizes = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge"), **sizes}
        if "nframes" in sizes:
            sizes.setdefault("num_frames", sizes.pop("nframes"))
        known = self.bounds(kind)
        checked: Options = {}
        for name, value in sizes.items():
            if value is None:
                continue
            if name == "fps" and kind == "video":
                checked[name] = bounded_number(name, value, 0.01, 120.0)
            elif name in known:
                checked[name] = bounded_count(name, value, 1, known[name])
            elif kind == "video" or name not in OF_VIDEOS:
                raise unknown_option(name, [*known, "size", *(("fps",) if kind == "video" else ())])
        return checked

    def little_detail(self) -> Options:
        return {"max_pixels": min(self.most, max(self.least, _LOW_DETAIL))}

    def embedded(self, count: int, grid: tuple[int, ...]) -> ItemShape:
        return ItemShape(embedded_grid(count, grid, self.merge), count, 0, embedded=True)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]

    def pairs(
        self, frames: Iterable[Image], count: int, size: tuple[int, int], step: float
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """Features and items of `count` frames of a video. `size`: height and width of each; `step`: positions from a pair
        to the next."""
        height, width = size
        pixels = np.empty((count, height, width, 3), np.uint8)
        for number, frame in enumerate(frames):
            pixels[number] = np.asarray(frame.resize((width, height), self.resample))
        h, w = height // self.patch, width // self.patch
        items = tuple(
            ItemShape(
                (1, h, w, first // FRAME_FACTOR, int(first // FRAME_FACTOR * step)), h * w // self.merge**2, h * w,
                first, min(first + FRAME_FACTOR, count),
            )
            for first in range(0, count, FRAME_FACTOR)
        )  # fmt: skip
        return pixels, items

    def positions(self, ids: Ids, items: Sequence[MediaItem]) -> npt.NDArray[np.int32]:
        """Text advances all axes by one a token. An item's rows and columns count from where it begins, those of a video's
        frames from where the video does (but for 3, whose frames stand alone), and text goes on behind the largest of all
        positions."""
        axes = np.empty((3, len(ids)), np.int32)
        at = position = begin = 0
        for item in items:
            _, h, w, *frame = item.grid
            pair, later = frame or (0, 0)
            together = pair > 0 and item.start == at and self.kind != "3"
            axes[:, at : item.start] = np.arange(position, position + item.start - at)
            begin = begin if together else position + item.start - at
            inside = np.indices((1, h // self.merge, w // self.merge)).reshape(3, -1)
            inside[0] = later if self.kind != "3" else 0
            axes[:, item.start : item.stop] = inside + begin
            position = max(position if together else 0, begin + max(int(inside.max()), 0) + 1)
            at = item.stop
        axes[:, at:] = np.arange(position, position + len(ids) - at)
        return axes


class QwenProcessor(QwenImages):
    """Every `merge x merge` patches are a position. An item's grid is (1, height, width) in patches; of a video, also its
    number in it, and how many positions it stands behind the first in time."""

    kinds = frozenset({"image", "video"})

    def __init__(self, config: Fields, *, patch: int, kind: Literal["2", "2.5", "3"]) -> None:
        """`patch`: the family's, where the processor's settings don't say."""
        self.kind = kind
        settings = processor_fields(config)
        vision = config.inner("vision_config")
        self.patch = settings.count("patch_size", default=vision.count("patch_size", default=patch))
        self.merge = settings.count("merge_size", default=vision.count("spatial_merge_size", default=2))
        self.resample = image_facts(settings).resample
        self.least, self.most = pixel_bounds(settings)
        videos = processor_fields(config, "video_processor")
        self.rules = VideoRules.of(videos, whole=kind == "3", factor=self.patch * self.merge)
        self.tokens_per_second = vision.number("tokens_per_second", default=2)
        self.image_id = config.count("image_token_id")
        self.video_id = config.count("video_token_id")
        self.start_id = config.count("vision_start_token_id")
        self.end_id = config.count("vision_end_token_id")

    @property
    def identity(self) -> str:
        rules: list[int | float | str] = [
            self.rules.least,
            self.rules.most,
            self.rules.fps,
            self.rules.min_frames,
            self.rules.max_frames,
        ]
        rules += [self.rules.capped, self.rules.tokens, self.kind]
        return json.dumps(["qwen-vl-1", self.patch, self.merge, self.resample, self.least, self.most, rules])

    def bounds(self, kind: MediaKind) -> dict[str, int]:
        if kind == "image":
            return super().bounds(kind)
        frames = dict.fromkeys(("num_frames", "min_frames", "max_frames"), self.rules.max_frames)
        return {"min_pixels": self.rules.most, "max_pixels": self.rules.most, **frames}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        least, most = int(options.get("min_pixels", self.least)), int(options.get("max_pixels", self.most))
        least = min(least, most)
        width, height = image.size
        height, width = resized(height, width, self.patch * self.merge, least, most)
        pixels = np.asarray(image.resize((width, height), self.resample))[None]
        grid = (1, height // self.patch, width // self.patch)
        patches = math.prod(grid)
        return pixels, (ItemShape(grid, patches // self.merge**2, patches),)

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        return self.rules.sample(info, options)

    def video(
        self, info: VideoInfo, indices: Sequence[int], frames: Iterable[Image], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...], tuple[str, ...]]:
        seconds = timestamps(indices, info.fps)
        step = 1.0
        if self.kind == "2.5":  # positions in time are seconds, between two pairs of frames
            rate = len(indices) / info.total * info.fps
            step = FRAME_FACTOR / rate * self.tokens_per_second
        size = self.rules.frame_size(info, len(indices), options)
        pixels, items = self.pairs(frames, len(indices), size, step)
        return pixels, items, tuple(f"<{each:.1f} seconds>" for each in seconds) if self.kind == "3" else ()

    def marker(self, kind: MediaKind) -> Marker:
        token = self.image_id if kind == "image" else self.video_id
        around = (self.start_id, token, self.end_id)
        if kind == "video" and self.kind == "3":  # each pair of frames has its own marks
            return Marker(around, around, token, also=(token,))
        return Marker((token,), around, token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        runs = super().pieces(kind, processed)
        if not processed.notes:
            return runs
        start, end = Token(self.start_id), Token(self.end_id)
        return [piece for note, run in zip(processed.notes, runs, strict=True) for piece in (note, start, run, end)]
