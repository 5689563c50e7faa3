"""A library compiled for this very machine, kept in the user's cache under a name made of everything it depends on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from bough.config.cache_directory import cache_directory
from bough.kernels.cpu_build.compiling import (
    COPIES,
    FLAGS,
    LINK_FLAGS,
    SOURCES,
    TIMEOUT_S,
    WORKPLACE,
    BuildFailed,
    compile_library,
)
from bough.platform.processor import find_compiler, fingerprint, processor

log = logging.getLogger("bough.kernels")

NATIVE = ("-march=native",)
_MOST_JOBS = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """A compiler and how it is called. `machine` says for which instruction sets."""

    compiler: str
    machine: tuple[str, ...] = NATIVE

    def key(self) -> str:
        """Changes with the sources, the flags, the compiler and the CPU."""
        digest = hashlib.sha256()
        for source in sorted(SOURCES.iterdir()):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        stat = os.stat(self.compiler)
        file = (os.path.realpath(self.compiler), stat.st_size, int(stat.st_mtime))
        parts = (*FLAGS, *COPIES, *LINK_FLAGS, *self.machine, *file, fingerprint())
        digest.update("\0".join(map(str, parts)).encode())
        return digest.hexdigest()[:24]


def find_recipe() -> Recipe:
    """The recipe for this machine. Raises `BuildFailed` where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler was found")
    return Recipe(compiler)


def build(recipe: Recipe) -> Path:
    """The library's path; compiles it if the cache doesn't have it. Safe against several processes at once."""
    folder = cache_directory() / "kernels"
    folder.mkdir(exist_ok=True)
    target = folder / f"bough_cpu_{recipe.key()}.so"
    if target.exists():
        return target
    _sweep(folder)
    log.info("compiling the CPU kernels (once for this machine, some seconds)")
    jobs = min(_MOST_JOBS, processor().logical_cpus)
    compile_library(recipe.compiler, recipe.machine, target, sources=SOURCES, jobs=jobs)
    return target


def _sweep(folder: Path) -> None:
    """Removes what killed compilations left behind: directories not written to for longer than one takes."""
    for workplace in folder.glob(f"{WORKPLACE}*"):
        with contextlib.suppress(OSError):
            if time.time() - workplace.stat().st_mtime > 2 * TIMEOUT_S:
                shutil.rmtree(workplace, ignore_errors=True)
