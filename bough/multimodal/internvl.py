"""Images for InternVL: cut into tiles in the shape that is nearest to the image's, and the whole image behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bough.config.fields import Fields
from bough.config.image_facts import image_facts, processor_fields
from bough.config.vit import IMAGENET, internvl_vit, ratio
from bough.core.media import MediaKind
from bough.multimodal.frames import FrameRules
from bough.multimodal.processor import Marker, Options, Piece, Processed, VideoInfo
from bough.multimodal.tiles import TileProcessor, image_token

if TYPE_CHECKING:
    from PIL.Image import Image


class InternvlProcessor(TileProcessor):
    """Four patches are a position. Frames of a video are numbered."""

    kinds = frozenset({"image", "video"})

    def __init__(self, config: Fields) -> None:
        vit = internvl_vit(config)
        settings = processor_fields(config)
        super().__init__(
            patches=vit.tokens,
            positions=(vit.side // ratio(config)) ** 2,
            facts=image_facts(settings, mean=IMAGENET[0], std=IMAGENET[1]),
            token=image_token(config),
        )
        self.side = vit.side * vit.patch
        self.rules = FrameRules.of(config)
        self.least = settings.count("min_patches", default=1)
        self.most = settings.count("max_patches", default=12)
        self.cuts = settings.flag("crop_to_patches", default=True)
        self.bounds = {"max_dynamic_patch": self.most, "min_dynamic_patch": self.most, "max_patches": self.most,
                       "min_patches": self.most}  # fmt: skip

    def settings(self) -> Sequence[Any]:
        return (self.side, self.facts.resample, self.least, self.most, self.cuts, str(self.rules))

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        checked = super().options(kind, given)
        for name in ("max", "min"):
            if f"{name}_dynamic_patch" in checked:
                checked.setdefault(f"{name}_patches", checked.pop(f"{name}_dynamic_patch"))
        return checked

    def little_detail(self) -> Options:
        return {"max_patches": 1}

    def tiles(self, image: Image, options: Options) -> tuple[list[Image], tuple[int, int]]:
        most = int(options.get("max_patches", self.most))
        least = min(most, int(options.get("min_patches", self.least)))
        whole = image.resize((self.side, self.side), self.facts.resample)
        if not self.cuts or most <= 1:
            return [whole], (0, 0)
        columns, rows = canvas(image.width, image.height, self.side, least, most)
        if rows * columns == 1:
            return [whole], (0, 0)
        large = image.resize((columns * self.side, rows * self.side), self.facts.resample)
        return [*cut(large, self.side), whole], (rows, columns)

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        assert self.rules is not None, "set above"
        return self.rules.middles(info, options)

    def marker(self, kind: MediaKind) -> Marker:
        return super().marker(kind) if kind == "image" else Marker("<video>", "<video>", self.token)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        runs = super().pieces(kind, processed)
        if kind == "image":
            return ["<img>", *runs, "</img>"]
        made: list[Piece] = []
        for number, run in enumerate(runs):
            made += [f"Frame{number + 1}: <img>", run, "</img>\n"]
        return [*made[:-1], "</img>"]


def cut(image: Image, side: int) -> list[Image]:
    """Squares of an image whose edges are multiples of theirs, row after row."""
    return [
        image.crop((left, top, left + side, top + side))
        for top in range(0, image.height, side)
        for left in range(0, image.width, side)
    ]


def canvas(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles: those whose shape is nearest to the image's; of equal shapes the larger, as long as it is
    less than twice as large as the image."""
    shapes = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    best, nearest = (1, 1), float("inf")
    for columns, rows in shapes:
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and width * height > 0.5 * side * side * columns * rows):
            best, nearest = (columns, rows), distance
    return best
