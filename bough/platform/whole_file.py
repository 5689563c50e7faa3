"""Files that are replaced in one move."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replaces a file: a reader sees the old content or the new one, whole, also if others write it at the same time.

    Only its owner can read it. `durable`: it outlives a loss of power from here on. Raises `OSError` and leaves the old
    content, and nothing beside it.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    if durable:
        _sync_names(path.parent)


def _sync_names(directory: Path) -> None:
    """Which file a name stands for is the directory's content, not the file's."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
