"""Where bough keeps what it can make or fetch again: compiled kernels, measurements, the default model."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/bough`, by default `~/.cache/bough`; a private temporary directory where that can't be written.

    Raises `PermissionError` if the temporary directory belongs to another user.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    wanted = (Path(base) if base else Path.home() / ".cache") / "bough"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    if os.access(wanted, os.W_OK | os.X_OK):
        return wanted
    private = Path(tempfile.gettempdir()) / f"bough-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.stat().st_uid != os.getuid():
        raise PermissionError(f"{private} belongs to another user; set XDG_CACHE_HOME to a directory of your own")
    return private
