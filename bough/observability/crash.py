"""Crash reports: what is known about a server that died, in one JSON file. Shapes, ids and settings; no text of
requests."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bough.config.concerns import Config
from bough.config.flags import show_value
from bough.config.server_args import public
from bough.core.errors import BoughError, ConfigError
from bough.observability.flight import RecordedStep

_KEPT = 50
"""Number of reports kept in a directory; older ones are removed."""
_MOST_STACK_CHARS = 100_000


def make_directory(directory: Path) -> None:
    """Makes the directory for crash reports, readable by its owner only. Raises `ConfigError` if it could not be
    written to in case of a crash."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK | os.X_OK)
    except OSError as error:
        raise _unusable(directory, error.strerror or str(error)) from error
    if not writable:
        raise _unusable(directory, "this user may not")


def _unusable(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        what=f"can't write to {directory}", why=why, fix="give --crash-dir a directory that can be", param="crash_dir"
    )


def write_bundle(
    directory: Path,
    *,
    process: str,
    error: BoughError,
    steps: list[RecordedStep],
    config: Config,
    facts: Mapping[str, Any],
    stacks: Mapping[str, str],
    version: str,
) -> Path:
    """Writes what is known to a new file that only its owner can read. `stacks`: native stacks by process.

    Raises `OSError` if the directory cannot be written to.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    bundle = {
        "version": version,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "process": process,
        "cause": {"what": error.what, "why": error.why, "fix": error.fix},
        "python": platform.python_version(),
        "system": platform.platform(),
        "settings": {name: show_value(value) for name, value in public(config).items()},
        "facts": {name: facts[name] for name in sorted(facts) if isinstance(facts[name], str | int | float)},
        "monotonic_s": time.monotonic(),
        "last_steps": [step.as_json() for step in steps],
        "stacks": {name: text[:_MOST_STACK_CHARS] for name, text in stacks.items() if text},
    }
    path = (
        directory
        / f"crash-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{time.monotonic_ns() % 10**9}.json"
    )
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(bundle, file, indent=1)
    for old in sorted(directory.glob("crash-*.json"), key=lambda each: each.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path
