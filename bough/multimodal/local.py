"""Media from the operator's own disk: files under one directory, opened part by part so that no link leads out of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from bough.multimodal.errors import MediaNotAllowed, MediaTooLarge, MediaUnreachable

_STEP = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def read_below(root: Path, parts: tuple[str, ...], most_bytes: int) -> bytes:
    """The regular file that `parts`, an absolute path's, name below `root`. Symbolic links are not followed.

    Raises `MediaNotAllowed`, `MediaTooLarge` or `MediaUnreachable`; a file that can't be read and one that does not exist
    look the same.
    """
    own = root.parts[1:]
    inner = parts[len(own) :]
    if parts[: len(own)] != own or not inner:
        raise MediaNotAllowed(
            what="this file can't be sent to the model",
            why="it is not under the directory that the server was started with for media",
            fix="send its bytes as a data: URL, or put it there",
        )
    opened: list[int] = []
    try:
        opened.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for part in inner[:-1]:
            opened.append(os.open(part, _STEP | os.O_DIRECTORY, dir_fd=opened[-1]))
        opened.append(os.open(inner[-1], _STEP, dir_fd=opened[-1]))
        return _read(opened[-1], most_bytes)
    except OSError as error:
        raise MediaUnreachable(
            what="this file can't be read",
            why="it is not there, is a link, or is closed to the server",
            fix="check its name",
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def read_file(path: Path, most_bytes: int) -> bytes:
    """A file that this process's own user named, wherever it is. Raises OSError and `MediaTooLarge`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _read(descriptor: int, most_bytes: int) -> bytes:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError("not a regular file")
    if facts.st_size > most_bytes:
        raise too_many_bytes(most_bytes)
    pieces, left = [], most_bytes + 1
    while left and (piece := os.read(descriptor, min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        raise too_many_bytes(most_bytes)
    return b"".join(pieces)


def too_many_bytes(most_bytes: int) -> MediaTooLarge:
    return MediaTooLarge(
        what=f"this file has more than {most_bytes:,} bytes", why="larger ones are not taken", fix="send a smaller one"
    )
