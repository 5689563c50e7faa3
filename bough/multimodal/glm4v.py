"""Images and videos for GLM-4.1V, 4.5V and 4.6V: resized as Qwen's are, but that an image counts as two frames."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import image_facts, processor_fields
from bough.core.media import MediaKind
from bough.multimodal.frames import MOST_FRAMES
from bough.multimodal.glm_video import GlmVideoRules
from bough.multimodal.processor import ItemShape, Marker, Options, Piece, Processed, Token, VideoInfo
from bough.multimodal.qwen_sizes import resized
from bough.multimodal.qwen_vl import QwenImages

if TYPE_CHECKING:
    from PIL.Image import Image

_LEAST: Final = 112 * 112
_MOST: Final = 28 * 28 * 15_000


class Glm4vProcessor(QwenImages):
    """Bounds of pixels are those of both frames. Pairs of frames of a video are items, each between marks of an image and
    with its time behind it."""

    kinds = frozenset({"image", "video"})
    kind = "3"

    def __init__(self, config: Fields) -> None:
        settings, vision = processor_fields(config), config.inner("vision_config")
        facts = image_facts(settings)
        self.patch = settings.count("patch_size", default=vision.count("patch_size", default=14))
        self.merge = settings.count("merge_size", default=vision.count("spatial_merge_size", default=2))
        self.frames = settings.count("temporal_patch_size", default=2)
        self.resample = facts.resample
        self.least, self.most = facts.edge("shortest_edge", _LEAST), facts.edge("longest_edge", _MOST)
        self.image_id = config.count("image_token_id")
        self.start_id = config.count("image_start_token_id", default=151_339)
        self.end_id = config.count("image_end_token_id", default=151_340)
        self.video_id = config.count("video_token_id")
        self.video_marks = tuple(config.count(f"video_{end}_token_id", default=0) for end in ("start", "end"))
        self.rules = GlmVideoRules.of(config, factor=self.patch * self.merge, frame_pixels=self.most // self.frames)

    @property
    def identity(self) -> str:
        sizes = [self.patch, self.merge, self.frames, self.resample, self.least, self.most]
        return json.dumps(["glm4v-2", *sizes, str(self.rules)])

    def bounds(self, kind: MediaKind) -> dict[str, int]:
        if kind == "image":
            return super().bounds(kind)
        most = self.rules.sizes.most
        return {"min_pixels": most, "max_pixels": most, "num_frames": MOST_FRAMES, "max_frames": MOST_FRAMES}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        least, most = int(options.get("min_pixels", self.least)), int(options.get("max_pixels", self.most))
        factor, (width, height) = self.patch * self.merge, image.size
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        height, width = resized(height, width, factor, min(least, most), most, counted=self.frames, frames=self.frames)
        pixels = np.asarray(image.resize((width, height), self.resample))[None]
        grid = (1, height // self.patch, width // self.patch)
        return pixels, (ItemShape(grid, math.prod(grid) // self.merge**2, math.prod(grid)),)

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        return self.rules.sample(info, options)

    def video(
        self, info: VideoInfo, indices: Sequence[int], frames: Iterable[Image], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...], tuple[str, ...]]:
        size = self.rules.frame_size(info, len(indices), options)
        return *self.pairs(frames, len(indices), size, 0.0), self.rules.notes(indices, info.fps)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        runs = super().pieces(kind, processed)
        if kind == "image":
            return runs
        start, end = Token(self.start_id), Token(self.end_id)
        return [piece for note, run in zip(processed.notes, runs, strict=True) for piece in (start, run, end, note)]

    def marker(self, kind: MediaKind) -> Marker:
        if kind == "video":
            start, end = ((mark,) if mark else () for mark in self.video_marks)
            return Marker((self.video_id,), (*start, self.video_id, *end), self.image_id)
        return Marker((self.image_id,), (self.start_id, self.image_id, self.end_id), self.image_id)
