"""Pictures by their bytes: which kind, how large, how many frames. Reads headers only and decodes nothing.

What a file's name or a server's header says about its type does not count; a decoder sees only what passed here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from bough.multimodal.errors import MediaUnsupported

Kind = Literal["png", "jpeg", "gif", "webp"]
VideoKind = Literal["mp4", "matroska", "avi"]
"""Containers: MP4 and MOV, MKV and WebM, AVI."""

_FRAMES_COUNTED = 1 << 16
"""Frames beyond these are not counted: no limit is that high."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A file as it came, and what its header says. Not decoded."""

    kind: Kind
    data: bytes
    width: int
    height: int
    frames: int

    @property
    def mime(self) -> str:
        return f"image/{self.kind}"

    @property
    def pixels(self) -> int:
        """Of all frames together."""
        return self.width * self.height * self.frames


Measured = tuple[int, int, int]
"""(width, height, frames)"""


def read_picture(data: bytes) -> Picture:
    """Recognises and measures a picture. Raises `MediaUnsupported`."""
    kind = sniff(data)
    if kind is None:
        raise MediaUnsupported(
            what="this is no picture of a kind that is taken",
            why="its first bytes are not those of a PNG, JPEG, GIF or WebP file",
            fix="send one of these",
        )
    try:
        width, height, frames = _MEASURES[kind](data)
    except (struct.error, IndexError, ValueError) as error:
        raise _broken(kind) from error
    if width < 1 or height < 1 or frames < 1:
        raise _broken(kind)
    return Picture(kind, data, width, height, frames)


def sniff(data: bytes) -> Kind | None:
    """The kind by the first bytes; None: none of ours."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return None


def sniff_video(data: bytes) -> VideoKind | None:
    """The container of a video by the first bytes; None: none of ours."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return None


def _broken(kind: str) -> MediaUnsupported:
    return MediaUnsupported(
        what=f"this {kind.upper()} file is broken",
        why="its header does not say how large the picture is",
        fix="save it again",
    )


def _png(data: bytes) -> Measured:
    """IHDR comes first, and decoders believe a second one; an animation says how many frames it has, and has as many
    controls. The largest of everything is believed."""
    if data[12:16] != b"IHDR":
        raise ValueError("no IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    said, controls = 1, 0
    at = 8
    while at + 12 <= len(data) and controls < _FRAMES_COUNTED:
        size, name = struct.unpack_from(">I4s", data, at)
        if name == b"acTL":
            said = max(said, struct.unpack_from(">I", data, at + 8)[0])
        elif name == b"fcTL":
            controls += 1
            inner = struct.unpack_from(">II", data, at + 12)
            width, height = max(width, inner[0]), max(height, inner[1])
        elif name == b"IHDR":
            inner = struct.unpack_from(">II", data, at + 8)
            width, height = max(width, inner[0]), max(height, inner[1])
        elif name == b"IEND":
            break
        at += 12 + size
    return width, height, max(1, said, controls)


_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers that begin a frame and say its size."""
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length."""


def _jpeg(data: bytes) -> Measured:
    """The largest size that any frame header says, up to the first scan."""
    at, width, height = 2, 0, 0
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise ValueError("no marker")
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker in _JPEG_BARE:
            at += 2
            continue
        if marker in (0xD9, 0xDA):
            break
        size = struct.unpack_from(">H", data, at + 2)[0]
        if size < 2:
            raise ValueError("no length")
        if marker in _JPEG_FRAMES:
            rows, columns = struct.unpack_from(">HH", data, at + 5)
            width, height = max(width, columns), max(height, rows)
        at += 2 + size
    return width, height, 1


def _gif(data: bytes) -> Measured:
    """The screen, or the furthest that a frame reaches beyond it."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _palette_bytes(flags)
    frames = 0
    while at < len(data) and frames < _FRAMES_COUNTED:
        block = data[at]
        if block == 0x2C:
            left, top, columns, rows, local = struct.unpack_from("<HHHHB", data, at + 1)
            width, height = max(width, left + columns), max(height, top + rows)
            frames += 1
            at = _after_sub_blocks(data, at + 11 + _palette_bytes(local))
        elif block == 0x21:
            at = _after_sub_blocks(data, at + 2)
        else:  # the trailer, or what no decoder reads
            break
    return width, height, frames


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_sub_blocks(data: bytes, at: int) -> int:
    while at < len(data) and data[at]:
        at += data[at] + 1
    return at + 1


def _webp(data: bytes) -> Measured:
    width = height = frames = 0
    for name, at in _riff_chunks(data):
        if name == b"VP8X":
            width, height = max(width, 1 + _int24(data, at + 4)), max(height, 1 + _int24(data, at + 7))
        elif name == b"ANMF":
            frames += 1
            width, height = max(width, 1 + _int24(data, at + 6)), max(height, 1 + _int24(data, at + 9))
        elif name == b"VP8L":
            if data[at] != 0x2F:
                raise ValueError("no signature")
            bits = struct.unpack_from("<I", data, at + 1)[0]
            width, height = max(width, 1 + (bits & 0x3FFF)), max(height, 1 + (bits >> 14 & 0x3FFF))
        elif name == b"VP8 ":
            if data[at + 3 : at + 6] != b"\x9d\x01\x2a":
                raise ValueError("no start code")
            columns, rows = struct.unpack_from("<HH", data, at + 6)
            width, height = max(width, columns & 0x3FFF), max(height, rows & 0x3FFF)
        if frames >= _FRAMES_COUNTED:
            break
    return width, height, max(1, frames)


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """(name, where its content begins) of each chunk."""
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        yield name, at + 8
        at += 8 + size + (size & 1)


def _int24(data: bytes, at: int) -> int:
    return int(data[at] | data[at + 1] << 8 | data[at + 2] << 16)


_MEASURES: dict[Kind, Callable[[bytes], Measured]] = {"png": _png, "jpeg": _jpeg, "gif": _gif, "webp": _webp}
