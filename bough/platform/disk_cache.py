"""Small results cached on disk between runs."""

from __future__ import annotations

import json
from typing import Any

from bough.config.cache_directory import cache_directory
from bough.platform.whole_file import write_whole


def recall(name: str, key: str) -> Any | None:
    """The value cached under `key` in the file `name`, or None."""
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
