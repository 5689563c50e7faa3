"""Whether kernels may be missing from the caches on disk: then compilers are started beside an engine's imports.

A file in each cache says that an engine with the same settings and kernels has had all of its own compiled. Where one is
missing, steps are rehearsed; where it is there and a kernel is not, that one is compiled at its first launch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import bough
from bough.config.cache_directory import cache_directory
from bough.config.concerns import Config
from bough.kernels import ahead
from bough.platform.facts import DeviceFacts
from bough.platform.whole_file import write_whole


def start_compilers(config: Config, facts: DeviceFacts, engines: int) -> None:
    """Starts compilers on this machine's cores, which `engines` engines share, if kernels may be missing."""
    if facts.kind != "cuda" or not config.device.custom_kernels or "TRITON_INTERPRET" in os.environ:
        return
    try:
        missing = not all(marker.exists() for marker in _markers(config, facts.name))
    except (OSError, RuntimeError):
        return  # nothing can be kept: a directory can't be used, or there is no home
    if missing:
        ahead.start(max(1, ahead.cores() // engines))


def note_compiled(config: Config, device: str) -> None:
    """The next start with these settings finds all it needs. `config`: as `start_compilers` had it."""
    with suppress(OSError, RuntimeError):
        for marker in _markers(config, device):
            marker.parent.mkdir(parents=True, exist_ok=True)
            write_whole(marker, b"")


def _markers(config: Config, device: str) -> list[Path]:
    """One in Triton's cache, one in our own."""
    name = f"started_{_key(config, device)}"
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    return [triton / name, cache_directory() / "kernels" / name]


def _key(config: Config, device: str) -> str:
    """Of what decides which kernels there are, as far as it is known before anything is read."""
    found = hashlib.sha256(repr((device, sys.version, *_versions(), *_sources(Path(bough.__file__).parent))).encode())
    decides = (config.model, config.device, config.scheduler, config.cache, config.speculative, config.media)
    found.update(repr(decides).encode())
    for file in (Path(config.model.model) / "config.json",):
        found.update(file.read_bytes() if file.is_file() else b"")
    return found.hexdigest()[:24]


def _versions() -> Iterator[str]:
    for package in ("torch", "triton"):
        try:
            yield importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield ""


def _sources(package: Path) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of every file that kernels are in, or are chosen by."""
    for folder in ("kernels", "layers", "models", "runner"):
        for directory, folders, files in os.walk(package / folder):
            folders.sort()
            for name in sorted(files):
                if name.endswith((".py", ".cu", ".cuh")):
                    facts = os.stat(os.path.join(directory, name))
                    yield name, facts.st_size, facts.st_mtime_ns
