"""Images for Command A Vision: tiles of a canvas into which the image fits unshrunk, if one is, and the whole image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bough.config.fields import Fields
from bough.config.image_facts import image_facts, processor_fields
from bough.config.vit import cohere2_vit
from bough.core.media import MediaKind
from bough.multimodal.internvl import cut
from bough.multimodal.llama4 import canvas
from bough.multimodal.processor import Options, Piece, PlaceholderRun, Processed
from bough.multimodal.tiles import TileProcessor, image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class Cohere2VisionProcessor(TileProcessor):
    """A mark stands behind each tile."""

    def __init__(self, config: Fields) -> None:
        vit, settings = cohere2_vit(config), processor_fields(config)
        positions = (vit.side // config.count("downsample_factor", default=2)) ** 2
        super().__init__(
            patches=vit.tokens, positions=positions, facts=image_facts(settings), token=image_token(config)
        )
        self.side = vit.side * vit.patch
        self.most = settings.count("max_patches", default=12) if settings.flag("crop_to_patches", default=True) else 1
        self.bounds = {"max_patches": self.most, "max_dynamic_patch": self.most}

    def settings(self) -> Sequence[Any]:
        return (self.side, self.facts.resample, self.most)

    def little_detail(self) -> Options:
        return {"max_patches": 1}

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        most = int(options.get("max_patches", options.get("max_dynamic_patch", self.most)))
        rows, columns = canvas(image.height, image.width, self.side, most, largest=False)
        whole = image.resize((self.side, self.side), self.facts.resample)
        if rows * columns == 1:
            return [whole], (0, 0)
        large = image.resize((columns * self.side, rows * self.side), self.facts.resample)
        return [*cut(large, self.side), whole], (rows, columns)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        made: list[Piece] = ["<|START_OF_IMG|>"]
        for number, item in enumerate(processed.items):
            made += [PlaceholderRun(number, self.positions_of_tile), "<|IMG_LINE_BREAK|>"] * item.grid[0]
        return [*made, "<|END_OF_IMG|>"]
