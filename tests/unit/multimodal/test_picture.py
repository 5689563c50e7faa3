"""Kinds, sizes and frames by headers alone are what Pillow finds by decoding; what lies is believed at its worst."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from bough.config.concerns import MediaConfig
from bough.multimodal import Door, MediaError, MediaTooLarge, MediaUnsupported, read_picture

SIZES = [(1, 1), (3, 7), (640, 480), (255, 256)]


def encoded(form: str, size: tuple[int, int], frames: int = 1, **options: object) -> bytes:
    """A picture made by Pillow; each frame has its own colour, so that none is merged away."""
    made = [Image.new("RGB", size, (40 * at % 256, 7 * at % 256, 90)) for at in range(frames)]
    out = io.BytesIO()
    animated = {"save_all": True, "append_images": made[1:]} if frames > 1 else {}
    made[0].save(out, form, **animated, **options)
    return out.getvalue()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_still_pictures(form: str, size: tuple[int, int]) -> None:
    picture = read_picture(encoded(form, size))
    assert (picture.kind, picture.width, picture.height, picture.frames) == (form.lower(), *size, 1)
    assert picture.mime == f"image/{form.lower()}"


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("JPEG", {"progressive": True}),
        ("WEBP", {"lossless": True}),
        ("PNG", {"optimize": True}),
        ("JPEG", {"exif": b"Exif\0\0"}),
    ],
)
def test_other_ways_to_write_them(form: str, options: dict[str, object]) -> None:
    picture = read_picture(encoded(form, (33, 21), **options))
    assert (picture.width, picture.height) == (33, 21)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP"])
@pytest.mark.parametrize("frames", [2, 5])
def test_animations(form: str, frames: int) -> None:
    data = encoded(form, (40, 30), frames)
    with Image.open(io.BytesIO(data)) as decoded:
        assert decoded.n_frames == frames
    picture = read_picture(data)
    assert (picture.width, picture.height, picture.frames) == (40, 30, frames)
    assert picture.pixels == 40 * 30 * frames


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"<svg/>", b"BM" + bytes(60), b"\x89PNG", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF0000WEBP",
     b"\xff\xd8\xff\xe0\x00\x00" + bytes(30), b"%PDF-1.4", b"GIF89a" + bytes(20), b"RIFF\0\0\0\0WEBPVP8 " + bytes(20)],
)  # fmt: skip
def test_what_is_no_picture(data: bytes) -> None:
    with pytest.raises(MediaUnsupported):
        read_picture(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP"]), st.data())
def test_broken_pictures_are_refused_or_measured(form: str, data: st.DataObject) -> None:
    """Cut anywhere and with bytes changed: an answer or a `MediaError`, nothing else, and soon."""
    whole = bytearray(encoded(form, (9, 5), 1 if form == "JPEG" else 3))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        picture = read_picture(cut)
    except MediaError:
        return
    assert picture.width > 0
    assert picture.height > 0
    assert picture.frames > 0


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_of(width: int, height: int, *more: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_by_its_header() -> None:
    """A few hundred bytes that would be gigabytes of pixels."""
    door = Door(MediaConfig())
    for bomb in (
        png_of(60_000, 60_000),
        png_of(2**31 - 1, 2**31 - 1),
        png_of(8, 8, chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))),
        encoded("GIF", (8, 8)).replace(struct.pack("<HH", 8, 8), struct.pack("<HH", 65_535, 65_535), 1),
    ):
        assert len(bomb) < 1000
        with pytest.raises(MediaTooLarge, match="pixels"):
            door.check(bomb)


def test_an_animation_that_lies_about_its_frames() -> None:
    said = png_of(10, 10, chunk(b"acTL", struct.pack(">II", 1_000_000, 0)))
    silent = png_of(10, 10, chunk(b"acTL", struct.pack(">II", 1, 0)), *[chunk(b"fcTL", bytes(26))] * 500)
    door = Door(MediaConfig())
    for data in (said, silent):
        with pytest.raises(MediaTooLarge, match="frames"):
            door.check(data)


def test_a_frame_larger_than_its_screen_counts() -> None:
    data = bytearray(encoded("GIF", (8, 8)))
    at = data.index(b"\x2c\0\0\0\0")
    data[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(MediaTooLarge, match="60,000 x 60,000"):
        Door(MediaConfig()).check(bytes(data))


def test_limits_are_inclusive() -> None:
    data = encoded("PNG", (20, 10), 3)
    door = Door(MediaConfig(max_media_pixels=600, max_media_frames=3, max_media_bytes=len(data)))
    assert door.check(data).pixels == 600
    for limits in ({"max_media_pixels": 599}, {"max_media_frames": 2}, {"max_media_bytes": len(data) - 1}):
        with pytest.raises(MediaTooLarge):
            Door(MediaConfig(**limits)).check(data)


def test_many_tiny_blocks_are_counted_in_time() -> None:
    """The worst that 8 MB can do to the walk: a GIF of one-byte blocks, a PNG of empty chunks."""
    gif = encoded("GIF", (8, 8))[:-1] + b"\x21\xfe" + b"\x01x" * 4_000_000 + b"\0;"
    png = png_of(8, 8, chunk(b"tEXt", b"") * 600_000)
    door = Door(MediaConfig())
    assert door.check(gif).frames == 1
    assert door.check(png).frames == 1


def test_our_own_pictures() -> None:
    images = Path(__file__).parents[3] / "docs" / "images"
    found = [path for path in images.glob("*") if path.suffix in (".png", ".jpg", ".gif", ".webp")]
    assert found, "there are some"
    for path in found:
        with Image.open(path) as decoded:
            assert (read_picture(path.read_bytes()).width, read_picture(path.read_bytes()).height) == decoded.size
