"""Images and videos for Kimi-K2.5: never enlarged, on a black ground whose edges are multiples of a position's pixels."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.kimi import media_settings, read_kimi
from bough.core.media import MediaKind
from bough.multimodal.embeds import embedded_grid
from bough.multimodal.frames import FRAME_OPTIONS, MOST_FRAMES, FrameRules, frame_option
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    Processor,
    VideoInfo,
    bounded_count,
    unknown_option,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_LOW_DETAIL = 36 * 36
"""Patches of an image of which a client wants little detail, at most."""


class KimiProcessor(Processor):
    """Squares of patches are positions. A few frames of a video are an item, with the time of the first before it. An item's
    grid is (frames, rows, columns) of patches."""

    kinds = frozenset({"image", "video"})

    def __init__(self, config: Fields) -> None:
        facts, settings = read_kimi(config), media_settings(config)
        self.facts = facts
        self.unit = facts.patch * facts.merge
        self.frames = settings.count("temporal_merge_kernel_size", default=4)
        self.frame_patches = min(settings.count("in_patch_limit_each_frame", default=4096), facts.most_patches)
        self.rules = FrameRules(
            num_frames=settings.count("max_num_frames_each_video", default=MOST_FRAMES),
            fps=settings.positive("sample_fps", default=2.0),
        )
        self.token = config.count("media_placeholder_token_id", default=163_605)

    @property
    def identity(self) -> str:
        facts = self.facts
        sizes = [facts.patch, facts.merge, facts.most_patches, facts.most_along, facts.image.resample]
        return json.dumps(["kimi-k25-1", *sizes, self.frames, self.frame_patches, str(self.rules)])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        known = {"max_patches", *FRAME_OPTIONS}
        checked: Options = {}
        for name, value in given.items():
            if name not in known:
                raise unknown_option(name, sorted(known))
            if value is None or (name in FRAME_OPTIONS and kind != "video"):
                continue
            most = self.facts.most_patches if kind == "image" else self.frame_patches
            checked[name] = frame_option(name, value) if name in FRAME_OPTIONS else bounded_count(name, value, 1, most)
        return checked

    def little_detail(self) -> Options:
        return {"max_patches": min(_LOW_DETAIL, self.facts.most_patches)}

    def embedded(self, count: int, grid: tuple[int, ...]) -> ItemShape:
        return ItemShape(embedded_grid(count, grid, self.facts.merge), count, 0, embedded=True)

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        pixels = self._on_black([image], int(options.get("max_patches", self.facts.most_patches)))
        return pixels, self._items(pixels, 1)

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        return self.rules.evenly(info, options)

    def video(
        self, info: VideoInfo, indices: Sequence[int], frames: Iterable[Image], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...], tuple[str, ...]]:
        pixels = self._on_black(frames, int(options.get("max_patches", self.frame_patches)))
        notes = tuple(_clock(index / info.fps) for index in indices[:: self.frames])
        return pixels, self._items(pixels, self.frames), notes

    def marker(self, kind: MediaKind) -> Marker:
        if kind == "video":
            mark = "<|kimi_k25_video_placeholder|>"
            return Marker(mark, mark, self.token)
        return Marker((self.token,), "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        runs = [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]
        if kind == "image":
            return runs
        made: list[Piece] = []
        for note, run in zip(processed.notes, runs, strict=True):
            made += [f"{note}<|media_begin|>video<|media_content|>", run, "<|media_end|>"]
        return made

    def _on_black(self, images: Iterable[Image], most: int) -> npt.NDArray[np.uint8]:
        from PIL import Image as Pictures

        made = []
        for image in images:
            height, width = fitted(image.height, image.width, self.facts.patch, most, self.facts.most_along)
            ground = Pictures.new("RGB", tuple(-(-edge // self.unit) * self.unit for edge in (width, height)))  # type: ignore[arg-type]
            ground.paste(image.resize((width, height), self.facts.image.resample))
            made.append(np.asarray(ground))
        return np.stack(made)

    def _items(self, pixels: npt.NDArray[np.uint8], run: int) -> tuple[ItemShape, ...]:
        """Of frames of one size, `run` of them each."""
        count, height, width, _ = pixels.shape
        h, w = height // self.facts.patch, width // self.facts.patch
        return tuple(
            ItemShape((last - first, h, w), h * w // self.facts.merge**2, (last - first) * h * w, first, last)
            for first, last in ((first, min(first + run, count)) for first in range(0, count, run))
        )


def fitted(height: int, width: int, patch: int, most: int, along: int) -> tuple[int, int]:
    """Height and width of an image of at most `most` patches, of which at most `along` lie along a side."""
    patches = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(most / patches), along * patch / height, along * patch / width)
    high, wide = (min(max(1, int(edge * scale)), along * patch) for edge in (height, width))
    return high, wide


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"
