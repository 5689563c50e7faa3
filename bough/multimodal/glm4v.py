"""Images for GLM-4.1V: resized as Qwen's are, but that an image counts as two frames."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import image_facts, processor_fields
from bough.core.media import MediaKind
from bough.multimodal.processor import ItemShape, Marker, Options
from bough.multimodal.qwen_sizes import resized
from bough.multimodal.qwen_vl import QwenImages

if TYPE_CHECKING:
    from PIL.Image import Image

_LEAST: Final = 112 * 112
_MOST: Final = 28 * 28 * 15_000


class Glm4vProcessor(QwenImages):
    """Bounds of pixels are those of both frames."""

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

    @property
    def identity(self) -> str:
        return json.dumps(["glm4v-1", self.patch, self.merge, self.frames, self.resample, self.least, self.most])

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

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.image_id,), (self.start_id, self.image_id, self.end_id), self.image_id)
