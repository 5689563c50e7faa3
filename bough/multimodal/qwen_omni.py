"""Images, videos and sounds for Qwen2.5-Omni and Qwen3-Omni. The sound of a video may stand between its frames."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from bough.config.fields import Fields
from bough.config.omni import OmniHearing, read_omni_hearing
from bough.core.media import MediaItem, MediaKind
from bough.core.messages import Ids
from bough.multimodal.hearing import lone_spectrum, padded_spectrum
from bough.multimodal.processor import (
    ItemShape,
    Marker,
    Options,
    Piece,
    PlaceholderRun,
    Processed,
    SoundRules,
    Token,
    VideoInfo,
    bounded_flag,
    unknown_option,
)
from bough.multimodal.qwen_video import FRAME_FACTOR
from bough.multimodal.qwen_vl import QwenProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

WITH_SOUND = "use_audio_in_video"
_LEAST = 4
"""Frames of a spectrum, which make at least one position."""
_SECONDS = 2400.0
"""Of a sound for Qwen3-Omni at most, as its authors take them."""


class QwenOmniProcessor(QwenProcessor):
    """Sounds are cut into segments, which are items of their own; their grids are frames of the spectrum. Frames of a video
    have no timestamps between them: their positions behind the first are those of sounds of the same time."""

    kinds = frozenset({"image", "video", "audio"})

    def __init__(self, config: Fields, *, patch: int, version: Literal["2.5", "3"]) -> None:
        super().__init__(config.also(image_token_id="image_token_index", video_token_id="video_token_index").put(
            vision_start_token_id=config.count("vision_start_token_id", default=151_652),
            vision_end_token_id=config.count("vision_end_token_id", default=151_653),
        ), patch=patch, kind="2.5")  # fmt: skip
        self.version = version
        self.hearing = read_omni_hearing(config, version)
        self.audio_id = config.count("audio_token_id", "audio_token_index", default=151_646)
        self.audio_start_id = config.count("audio_start_token_id", default=151_647)
        ends = {"2.5": 151_648, "3": 151_670}
        self.audio_end_id = config.count("audio_end_token_id", default=ends[version])
        self.tokens_per_second = config.number("position_id_per_seconds", default=25 if version == "2.5" else 13)
        seconds = config.number("seconds_per_chunk", default=2)
        self.per_chunk = int(self.tokens_per_second * seconds)
        """Positions of frames, and of sound, that take turns (2.5)."""
        self.fps = 2.0 if version == "2.5" else 1.0
        """Frames a second by which positions in time are counted, unless a request names others."""

    @property
    def identity(self) -> str:
        ear = self.hearing
        sounds = [
            ear.mels,
            ear.rate,
            ear.window,
            ear.hop,
            ear.chunk,
            ear.segment,
            self.tokens_per_second,
            self.per_chunk,
        ]
        return json.dumps([f"qwen{self.version}-omni-1", super().identity, sounds])

    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        rest = {name: value for name, value in given.items() if name != WITH_SOUND}
        wanted = bounded_flag(WITH_SOUND, given.get(WITH_SOUND))
        if kind == "audio":
            for name in set(rest) - {*self.bounds("video"), "fps", "size", "nframes"}:
                raise unknown_option(name, [WITH_SOUND])
            return {}
        checked = super().options(kind, rest)
        return {**checked, WITH_SOUND: True} if wanted and kind == "video" else checked

    def with_sound(self, kind: MediaKind, options: Options) -> bool:
        return kind == "video" and bool(options.get(WITH_SOUND))

    @property
    def sound(self) -> SoundRules:
        return SoundRules(self.hearing.rate, self.hearing.seconds if self.version == "2.5" else _SECONDS)

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """Behind a sound is silence (Qwen2.5-Omni), or nothing behind the last of several chunks (Qwen3-Omni), as in
        training."""
        ear = self.hearing
        if self.version == "2.5":
            frames = max(_LEAST, -(-len(samples) // ear.hop))
            whole = padded_spectrum(ear, samples, frames + ear.window)[:frames]
            return np.ascontiguousarray(whole), segment_items(ear, frames, frames)
        whole = lone_spectrum(ear, samples, ear.window)
        frames = len(whole)
        if frames > ear.chunk:
            whole = np.pad(whole, ((0, -frames % ear.chunk), (0, 0)))
        return whole, segment_items(ear, frames, len(whole))

    def video(
        self, info: VideoInfo, indices: Sequence[int], frames: Iterable[Image], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...], tuple[str, ...]]:
        pixels, items, notes = super().video(info, indices, frames, options)
        step = FRAME_FACTOR / float(options.get("fps", self.fps)) * self.tokens_per_second
        shown = [
            ItemShape((*item.grid[:4], int(pair * step)), item.count, item.cost, item.first, item.last)
            for pair, item in enumerate(items)
        ]
        return pixels, tuple(shown), notes

    def marker(self, kind: MediaKind) -> Marker:
        if kind == "audio":
            around = (self.audio_start_id, self.audio_id, self.audio_end_id)
            return Marker((self.audio_id,), around, self.audio_id)
        return super().marker(kind)

    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        runs = [PlaceholderRun(number, item.count) for number, item in enumerate(processed.items)]
        if processed.sound is None:
            return runs
        heard = sum(item.count for item in processed.sound)
        made: list[Piece] = [Token(self.audio_start_id)]
        at = 0
        for run, item in zip(runs, processed.items, strict=True):
            upto = min(heard, self._heard_before(item.grid[4]))
            made += [*_sounds(processed.sound, at, upto), run]
            at = max(at, upto)
        return [*made, *_sounds(processed.sound, at, heard), Token(self.audio_end_id)]

    def _heard_before(self, time: int) -> int:
        """Positions of sound that stand before frames which stand at `time`."""
        return time if self.version == "3" else time // self.per_chunk * self.per_chunk

    def positions(self, ids: Ids, items: Sequence[MediaItem]) -> npt.NDArray[np.int32]:
        """Sounds count as text does. Those between frames count from where the video begins."""
        axes = np.empty((3, len(ids)), np.int32)
        at = position = 0
        is_media = np.isin(ids, [self.video_id, self.audio_id])
        for start, stop in self._shown(ids, items, is_media):
            axes[:, at:start] = np.arange(position, position + start - at)
            heard = np.flatnonzero(ids[start:stop] == self.audio_id) + start
            both = len(heard) > 0 and self.version == "2.5"
            if both:  # its two marks stand at one place, those behind it, too
                axes[:, start - 1] -= 1
            begin = position + start - at - both
            axes[:, heard] = begin + np.arange(len(heard))
            for item in items:
                if start <= item.start < stop and len(item.grid) > 1:
                    _, h, w, *frame = item.grid
                    inside = np.indices((1, h // self.merge, w // self.merge)).reshape(3, -1)
                    inside[0] = frame[1] if frame else 0
                    axes[:, item.start : item.stop] = inside + begin
            position, at = int(axes[:, start:stop].max()) + 1, stop
            if both:
                axes[:, stop : stop + 2] = position
                position, at = position + 1, stop + 2
        axes[:, at:] = np.arange(position, position + len(ids) - at)
        return axes

    def _shown(
        self, ids: Ids, items: Sequence[MediaItem], is_media: npt.NDArray[np.bool_]
    ) -> Iterable[tuple[int, int]]:
        """From where to where images and videos stand, with the sounds between their frames."""
        at = 0
        for item in items:
            if len(item.grid) > 1 and item.start >= at:
                at = item.stop
                while item.token == self.video_id and at < len(ids) and is_media[at]:
                    at += 1
                yield item.start, at


def segment_items(ear: OmniHearing, frames: int, rows: int) -> tuple[ItemShape, ...]:
    """The items of a sound of `frames`, the last of which has all of the spectrum's `rows` that are left."""
    items = []
    for first in range(0, frames, ear.segment):
        length = min(ear.segment, frames - first)
        count, last = ear.positions(length), min(first + ear.segment, rows)
        if count:
            items.append(ItemShape((length,), count, ear.tokens(length), first, last))
    return tuple(items)


def _sounds(items: Sequence[ItemShape], start: int, stop: int) -> list[Piece]:
    """Placeholders of positions `start .. stop - 1` of a sound."""
    made: list[Piece] = []
    first = 0
    for number, item in enumerate(items):
        low, high = max(start, first), min(stop, first + item.count)
        if low < high:
            made.append(PlaceholderRun(number, high - low, of_sound=True))
        first += item.count
    return made
