"""Images for MiniCPM-V 4.6: the whole image, and slices of it if it is large, near their own shapes, with its number. Videos
are frames of which each is treated as an image."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.minicpmv import read_minicpmv
from bough.core.errors import ConfigError
from bough.core.media import MediaKind
from bough.multimodal.errors import MediaError
from bough.multimodal.frames import FRAME_OPTIONS, FrameRules, frame_option, video_fields
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
from bough.multimodal.tiles import image_token, patches_of

if TYPE_CHECKING:
    from PIL.Image import Image


_STEPS: Final = 10
"""A second, among which the frames of a long video are chosen."""


class MiniCpmProcessor(Processor):
    """The whole image and each slice are items, and so they are of a video's frames. An item's grid is rows and columns of
    patches, and those of slices (0 and 0: there are none)."""

    kinds = frozenset({"image", "video"})

    def __init__(self, config: Fields) -> None:
        self.facts = read_minicpmv(config)
        films = video_fields(config)
        if films.count("stack_frames", default=1) != 1:
            raise ConfigError(
                what="stack_frames is not 1",
                why="frames are not put beside one another",
                fix="serve another checkpoint",
            )
        self.frames = films.count("max_num_frames", default=128)
        """Of a video; one a second, if that is fewer."""
        slices = films.count("max_slice_nums", default=9) if films.flag("slice_mode", default=True) else 1
        self.slices: Mapping[MediaKind, int] = {"image": self.facts.slices, "video": slices}
        self.video_token = config.count("video_token_id", default=0)
        self.unit = self.facts.by * self.facts.vit.patch
        self.numbers = processor_fields(config).flag("use_image_id", default=True)
        self.token = image_token(config)

    @property
    def identity(self) -> str:
        facts = self.facts
        sizes = [self.unit, facts.by, facts.resolution, *self.slices.values(), self.frames]
        return json.dumps(["minicpmv-2", *sizes, facts.vit.image.resample])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        known = {"max_slice_nums", *FRAME_OPTIONS}
        checked: Options = {}
        for name, value in given.items():
            if name not in known:
                raise unknown_option(name, sorted(known))
            if value is None or (name in FRAME_OPTIONS and kind != "video"):
                continue
            of_frames = name in FRAME_OPTIONS
            checked[name] = frame_option(name, value) if of_frames else bounded_count(name, value, 1, self.slices[kind])
        return checked

    def little_detail(self) -> Options:
        return {"max_slice_nums": 1}

    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        return self._cut(image, int(options.get("max_slice_nums", self.slices["image"])), 0)

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        """One frame a second, or as many as there may be of a longer video, at tenths of seconds."""
        if "num_frames" in options or "fps" in options:
            return FrameRules(num_frames=self.frames, fps=1.0).evenly(info, options)
        most, seconds = min(self.frames, int(options.get("max_frames", self.frames))), info.total / info.fps
        if seconds <= most:
            return [int(second * info.fps) for second in range(math.ceil(seconds))]
        places = [round(number * (1 / _STEPS), 1) for number in range(int(seconds / (1 / _STEPS)))]
        taken = np.linspace(0, len(places) - 1, min(most, len(places)), dtype=int).tolist()
        return [min(int(places[at] * info.fps), info.total - 1) for at in taken]

    def video(
        self, info: VideoInfo, indices: Sequence[int], frames: Iterable[Image], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...], tuple[str, ...]]:
        most, first = int(options.get("max_slice_nums", self.slices["video"])), 0
        parts: list[npt.NDArray[Any]] = []
        items: list[ItemShape] = []
        for frame in frames:
            patches, own = self._cut(frame, most, first)
            parts.append(patches)
            items += own
            first += len(patches)
        return np.concatenate(parts), tuple(items), ()

    def _cut(self, image: Image, most: int, first: int) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """Patches of an image in at most `most` slices, and its items, the first of which begins at patch `first`."""
        width, height = image.size
        edge, filter_ = self.facts.resolution, self.facts.vit.image.resample
        rows, columns = slices(height, width, edge, most)
        high, wide = self._fitted(height, width, enlarge=not rows)
        parts = [image.resize((wide, high), filter_)]
        if rows:
            high, wide = self._fitted(_nearest(height, rows) / rows, _nearest(width, columns) / columns, enlarge=True)
            large = image.resize((wide * columns, high * rows), filter_)
            boxes = [(column * wide, row * high) for row in range(rows) for column in range(columns)]
            parts += [large.crop((left, top, left + wide, top + high)) for left, top in boxes]
        patches = [patches_of(np.asarray(part), self.facts.vit.patch) for part in parts]
        items = []
        for part, own in zip(parts, patches, strict=True):
            grid = (part.height // self.facts.vit.patch, part.width // self.facts.vit.patch, rows, columns)
            count = len(own) // self.facts.by**2
            if count > self.facts.max_positions:
                raise MediaError(
                    what=f"the image has {width} x {height} pixels", why="it is too long and thin", fix="cut it"
                )
            items.append(ItemShape(grid, count, len(own), first, first + len(own)))
            first += len(own)
        return np.concatenate(patches), tuple(items)

    def marker(self, kind: MediaKind) -> Marker:
        token = self.token if kind == "image" else self.video_token
        return Marker((token,), (token,), token)

    def prefix(self, kind: MediaKind, number: int) -> Sequence[Piece]:
        return [f"<image_id>{number}</image_id>"] if self.numbers else []

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        made: list[Piece] = []
        number = 0
        while number < len(processed.items):
            _, _, rows, columns = processed.items[number].grid
            made += ["<image>", PlaceholderRun(number, processed.items[number].count), "</image>"]
            number += 1
            for place in range(rows * columns):
                made += ["\n"] if place and place % columns == 0 else []
                made += ["<slice>", PlaceholderRun(number, processed.items[number].count), "</slice>"]
                number += 1
        return made

    def _fitted(self, height: float, width: float, *, enlarge: bool) -> tuple[int, int]:
        """Height and width as multiples of a position's pixels; as many pixels as a slice has, if there are more."""
        edge = self.facts.resolution
        if height * width > edge * edge or enlarge:
            ratio = width / height
            height = int(edge / math.sqrt(ratio))
            width = int(height * ratio)
        return _nearest(height, self.unit), _nearest(width, self.unit)


def slices(height: int, width: int, edge: int, most: int) -> tuple[int, int]:
    """Rows and columns of about as many slices as squares of `edge` fit into the image, in the shape that is nearest to its
    own; 0 and 0: it is not cut."""
    count = min(math.ceil(width * height / (edge * edge)), most)
    if count <= 1:
        return 0, 0
    best, least = (1, 1), math.inf
    for number in (count - 1, count, count + 1):
        if number == 1 or number > most:
            continue
        for rows in range(1, number + 1):
            if number % rows:
                continue
            error = abs(math.log(width / height) - math.log(number // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, number // rows), error
    return best


def _nearest(length: float, step: int) -> int:
    """The nearest multiple, at least one."""
    return max(round(length / step) * step, step)
