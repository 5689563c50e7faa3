"""Images for Gemma 3: one square each, whatever their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bough.config.fields import Fields
from bough.config.image_facts import HALF, image_facts, processor_fields
from bough.config.vit import BILINEAR, gemma3_vit, pooled_by
from bough.core.media import MediaKind
from bough.multimodal.processor import Marker, Options, Piece, Processed, Token
from bough.multimodal.tiles import TileProcessor, image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class Gemma3Processor(TileProcessor):
    """Squares of patches are positions. Chat templates write the mark of a beginning for an image."""

    def __init__(self, config: Fields) -> None:
        vit = gemma3_vit(config)
        facts = image_facts(processor_fields(config), mean=HALF, std=HALF, resample=BILINEAR)
        positions = (vit.side // pooled_by(config, vit)) ** 2
        super().__init__(patches=vit.tokens, positions=positions, facts=facts, token=image_token(config))
        self.side = vit.side * vit.patch
        self.start_id = config.count("boi_token_id", "boi_token_index", default=255_999)
        self.end_id = config.count("eoi_token_id", "eoi_token_index", default=256_000)

    def settings(self) -> Sequence[Any]:
        return (self.side, self.facts.resample)

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        return [image.resize((self.side, self.side), self.facts.resample)], (0, 0)

    def marker(self, kind: MediaKind) -> Marker:
        return Marker((self.start_id,), (self.start_id,), self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        return ["\n\n", Token(self.start_id), *super().pieces(kind, processed), Token(self.end_id), "\n\n"]
