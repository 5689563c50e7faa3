"""Videos as workers decode them: how long they are is known first, and only frames that are wanted become images.

Animations (GIF, WebP, APNG) are read by Pillow, everything else by PyAV, an extra.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from PIL import Image, ImageSequence

from bough.multimodal.errors import MediaTooLarge, MediaUnsupported
from bough.multimodal.processor import VideoInfo

_FORMATS = {"mp4": "mov,mp4,m4a,3gp,3g2,mj2", "matroska": "matroska,webm", "avi": "avi"}
"""PyAV's names of the demuxers, so that no other one is tried."""
_ANIMATION_FPS = 10.0
"""Of animations that don't say."""


class Film(Protocol):
    """A video that is open."""

    info: VideoInfo

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these numbers, which ascend, in RGB. One that is asked for twice comes twice."""
        ...


def open_film(data: bytes, kind: str, max_pixels: int) -> Film:
    """Raises `MediaError` if it can't be decoded, or if a frame has more than `max_pixels`."""
    try:
        film: Film = _Container(data, kind) if kind in _FORMATS else Animation(data)
    except (MediaUnsupported, MemoryError):
        raise
    except Exception as error:  # decoders raise anything
        raise _broken() from error
    if film.info.total < 1:
        raise _broken()
    if film.info.width * film.info.height > max_pixels:
        raise MediaTooLarge(
            what=f"this video's frames have {film.info.width:,} x {film.info.height:,} pixels",
            why=f"at most {max_pixels:,} are taken (--max-media-pixels)",
            fix="send a smaller one",
        )
    return film


class Animation:
    """Frames in a picture's file."""

    def __init__(self, data: bytes) -> None:
        self._image = Image.open(io.BytesIO(data), formats=("GIF", "WEBP", "PNG"))
        total = int(getattr(self._image, "n_frames", 1))
        shown_ms = 0
        for frame in ImageSequence.Iterator(self._image):
            frame.load()  # WebP says how long a frame is shown once it is decoded
            shown_ms += int(frame.info.get("duration", 0))
        fps = 1000 * total / shown_ms if shown_ms > 0 else _ANIMATION_FPS
        self.info = VideoInfo(total=total, fps=fps, width=self._image.width, height=self._image.height)

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            self._image.seek(index)
            yield self._image.convert("RGB")


class StillFilm:
    """Frames that were taken out before."""

    def __init__(self, images: Sequence[Image.Image], info: VideoInfo) -> None:
        self._images = images
        self.info = info

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        return iter(self._images)


class _Container:
    """A file with a stream of video, decoded from its beginning to the last frame that is wanted."""

    def __init__(self, data: bytes, kind: str) -> None:
        try:
            import av
        except ImportError as error:
            raise MediaUnsupported(
                what="this server decodes no video files",
                why="PyAV is not installed",
                fix="install bough[video], or send the video's frames",
            ) from error
        self._av: Any = av
        self._data = data
        self._format = _FORMATS[kind]
        with self._open() as container:
            stream = container.streams.video[0]
            width, height = int(stream.codec_context.width), int(stream.codec_context.height)
            rate = stream.average_rate or stream.guessed_rate
            total = int(stream.frames) or sum(1 for packet in container.demux(stream) if packet.size)
        self.info = VideoInfo(total=total, fps=float(rate) if rate else 24.0, width=width, height=height)

    def _open(self) -> Any:
        options = {"protocol_whitelist": "file"}
        return self._av.open(io.BytesIO(self._data), format=self._format, options=options)

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        left = list(indices)
        frame = None
        with self._open() as container:
            stream = container.streams.video[0]
            for number, decoded in enumerate(container.decode(stream)):
                frame = decoded
                while left and left[0] <= number:
                    del left[0]
                    yield frame.to_image()
                if not left:
                    return
        if frame is None:
            raise _broken()
        for _ in left:  # the file has fewer frames than it says
            yield frame.to_image()


def _broken() -> MediaUnsupported:
    return MediaUnsupported(what="this video can't be decoded", why="its file is broken", fix="save it again")
