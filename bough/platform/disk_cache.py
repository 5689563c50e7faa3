"""The user's cache directory, and small answers remembered there between runs."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from bough.platform.whole_file import write_whole


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/bough`, by default `~/.cache/bough`; a private temporary directory where that can't be written."""
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
        raise PermissionError(f"{private} belongs to somebody else; set XDG_CACHE_HOME to a directory of your own")
    return private


def recall(name: str, key: str) -> Any | None:
    """What was remembered under `key` in the file `name`, or None."""
    try:
        return json.loads((cache_directory() / f"{name}.json").read_text()).get(key)
    except (OSError, ValueError, AttributeError):
        return None


def remember(name: str, key: str, value: Any) -> None:
    """Keeps `value` for later runs. A cache that can't be written is not an error."""
    try:
        path = cache_directory() / f"{name}.json"
        try:
            entries = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            entries = {}
        entries[key] = value
        write_whole(path, json.dumps(entries, indent=1, sort_keys=True).encode())
    except OSError:
        return
