"""Encodes images and videos for a server."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path

from bough.lang.errors import LangError

_MAGIC = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
    (b"BM", "image/bmp"),
)


def data_url(source: str | bytes, default_type: str) -> str:
    """`source` (a path, bytes, or already a URL) as a URL that a server can read without access to this machine's
    files."""
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return source
    if isinstance(source, str):
        try:
            content = Path(source).read_bytes()
        except OSError as error:
            raise LangError(
                what=f"can't read {source!r}",
                why=f"{type(error).__name__}: {error.strerror}",
                fix="pass an existing path, a URL, or the file's bytes",
            ) from error
        media_type = mimetypes.guess_type(source)[0] or _sniff(content, default_type)
    else:
        content, media_type = source, _sniff(source, default_type)
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def split_data_url(url: str) -> tuple[str, str] | None:
    """(media type, base64 data) of a data URL; None for any other URL."""
    if not url.startswith("data:"):
        return None
    head, _, data = url.partition(",")
    return head.removeprefix("data:").removesuffix(";base64"), data


def _sniff(content: bytes, default_type: str) -> str:
    for magic, media_type in _MAGIC:
        if content.startswith(magic):
            return media_type
    return default_type
