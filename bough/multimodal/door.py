"""`Door`: from what a client named to a `Picture` within the limits. Every entrance and every command uses this one."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterator
from pathlib import Path

from bough.config.concerns import MediaConfig
from bough.core.errors import ConfigError
from bough.multimodal.address import parse_file
from bough.multimodal.allowed import AllowList
from bough.multimodal.errors import MediaError, MediaNotAllowed, MediaTooLarge, MediaUnsupported
from bough.multimodal.local import read_below, too_many_bytes
from bough.multimodal.look_up import Resolve, look_up
from bough.multimodal.picture import Picture, read_picture, sniff_video
from bough.multimodal.sound import sniff_sound

_MOST_HEAD = 256
"""Characters of a data: URL before its comma."""
_CHARS_AT_ONCE = 1 << 18
"""Of base64, decoded while other threads wait: less than a millisecond. A multiple of 4."""


class Door:
    """Takes `data:` URLs always, `http(s):` from listed domains, `file:` from below one directory if there is one."""

    def __init__(self, config: MediaConfig, *, resolve: Resolve = look_up) -> None:
        """Raises `ConfigError` if the settings can't be meant."""
        self._config = config
        self._allowed = AllowList.of(config.allowed_media_domains)
        self._root = _root(config.allowed_local_media_path)
        self._resolve = resolve

    async def fetch(self, url: str) -> Picture:
        """Raises `MediaError`. Nothing of the picture has been decoded."""
        data = await self.read(url)
        return await asyncio.to_thread(self.check, data)

    def check(self, data: bytes) -> Picture:
        """The picture that these bytes are, if it is within the limits. Raises `MediaError`."""
        config = self._config
        if len(data) > config.max_media_bytes:
            raise too_many_bytes(config.max_media_bytes)
        picture = read_picture(data)
        if picture.frames > config.max_media_frames:
            raise MediaTooLarge(
                what=f"this picture has {picture.frames:,} frames",
                why=f"at most {config.max_media_frames:,} are taken",
                fix="send fewer",
            )
        if picture.pixels > config.max_media_pixels:
            times = f" x {picture.frames} frames" if picture.frames > 1 else ""
            raise MediaTooLarge(
                what=f"this picture has {picture.width:,} x {picture.height:,} pixels{times}",
                why=f"at most {config.max_media_pixels:,} pixels are taken",
                fix="send a smaller one",
            )
        return picture

    def check_video(self, data: bytes) -> str:
        """What kind of file a video is, by its first bytes. Raises `MediaError`: an animation must be within the limits of
        pictures; other files are measured when they are decoded."""
        if len(data) > self._config.max_media_bytes:
            raise too_many_bytes(self._config.max_media_bytes)
        kind = sniff_video(data)
        if kind is not None:
            return kind
        try:
            return self.check(data).kind
        except MediaUnsupported as error:
            raise MediaUnsupported(
                what="this is no video of a kind that is taken",
                why="its first bytes are not those of an MP4, MOV, WebM, MKV or AVI file, nor of an animation",
                fix="send one of these",
            ) from error

    def check_sound(self, data: bytes) -> str:
        """What kind of file a sound is, by its first bytes. Raises `MediaError`."""
        if len(data) > self._config.max_media_bytes:
            raise too_many_bytes(self._config.max_media_bytes)
        kind = sniff_sound(data)
        if kind is None:
            raise MediaUnsupported(
                what="this is no sound of a kind that is taken",
                why="its first bytes are not those of a WAV, MP3, FLAC, Ogg, MP4 or WebM file",
                fix="send one of these",
            )
        return kind

    async def read(self, url: str) -> bytes:
        """The bytes that a URL names, within the limits, whatever they are. Raises `MediaError`."""
        scheme = url[:8].partition(":")[0].lower()
        match scheme:
            case "data":
                return await asyncio.to_thread(_from_data_url, url, self._config.max_media_bytes)
            case "http" | "https":
                from bough.multimodal.remote import fetch  # a client, which most servers never need

                return await fetch(
                    url, self._allowed, most_bytes=self._config.max_media_bytes, timeout_s=self._config.media_timeout_s,
                    resolve=self._resolve,
                )  # fmt: skip
            case "file":
                if self._root is None:
                    raise MediaNotAllowed(
                        what="this server reads no media from its disk",
                        why="it was started without --allowed-local-media-path",
                        fix="send the bytes as a data: URL",
                    )
                parts = parse_file(url)
                return await asyncio.to_thread(read_below, self._root, parts, self._config.max_media_bytes)
        raise MediaError(
            what="this names no picture",
            why="it must be a data:, http(s): or file: URL",
            fix="send the bytes as a data: URL",
        )


def _from_data_url(url: str, most_bytes: int) -> bytes:
    comma = url.find(",", 0, _MOST_HEAD + 1)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise MediaError(
            what="this is no data: URL that can be read", why="its bytes must be in base64",
            fix="for example data:image/png;base64,iVBORw0...",
        )  # fmt: skip
    if (len(url) - comma - 1) * 3 // 4 > most_bytes + 2:
        raise too_many_bytes(most_bytes)
    try:
        return b"".join(_decoded(url, comma + 1))
    except (binascii.Error, ValueError) as error:
        raise MediaError(
            what="this data: URL is broken", why="what follows the comma is not base64", fix="check it"
        ) from error


def _decoded(text: str, start: int) -> Iterator[bytes]:
    """The bytes of base64, in parts: decoding holds the interpreter's lock, and other threads must not wait for all of it.
    Raises `ValueError`."""
    for at in range(start, len(text), _CHARS_AT_ONCE):
        part = text[at : at + _CHARS_AT_ONCE]
        if "=" in part and at + _CHARS_AT_ONCE < len(text):
            raise ValueError("padding before the end")
        yield base64.b64decode(part, validate=True)


def _root(given: str) -> Path | None:
    if not given:
        return None
    root = Path(given).expanduser()
    if not root.is_dir() or root.resolve() == Path("/"):
        raise ConfigError(
            what=f"media can't be read from {given}",
            why="it is the whole disk" if root.is_dir() else "there is no such directory",
            fix="name a directory that holds nothing else, with --allowed-local-media-path",
            param="allowed_local_media_path",
        )
    return root.resolve()
