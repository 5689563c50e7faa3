"""Images for LLaVA 1.5: the shorter edge to a tile's, and the middle of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bough.config.fields import Fields
from bough.config.image_facts import image_facts, processor_fields
from bough.config.vit import llava_vit
from bough.multimodal.processor import Options
from bough.multimodal.tiles import TileProcessor, image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class LlavaProcessor(TileProcessor):
    """Every patch is a position."""

    def __init__(self, config: Fields) -> None:
        vit = llava_vit(config)
        settings = processor_fields(config)
        facts = image_facts(settings)
        side = vit.side * vit.patch
        super().__init__(patches=vit.tokens, positions=vit.side**2, facts=facts, token=image_token(config))
        self.side = side
        self.edge = facts.edge("shortest_edge", side)

    def settings(self) -> Sequence[Any]:
        return (self.side, self.edge, self.facts.resample)

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        return [centre_crop(shortest_edge(image, self.edge, self.facts.resample), self.side)], (0, 0)


def shortest_edge(image: Image, edge: int, resample: int) -> Image:
    """The image with a shorter edge of `edge` pixels."""
    width, height = image.size
    other = int(edge * max(width, height) / min(width, height))
    return image.resize((edge, other) if width <= height else (other, edge), resample)


def centre_crop(image: Image, side: int) -> Image:
    """The middle; what is missing is black."""
    width, height = image.size
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))
