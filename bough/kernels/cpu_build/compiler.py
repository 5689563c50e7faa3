"""From sources to a shared library in the cache, named by everything it depends on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bough.platform.disk_cache import cache_directory
from bough.platform.processor import find_compiler, fingerprint, processor

log = logging.getLogger("bough.kernels")

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    "-std=c++20", "-O2", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-w",
)  # fmt: skip
NATIVE = ("-march=native",)
TIMEOUT_S = 300.0
_WORKPLACE = ".build-"


class BuildFailed(Exception):
    """The compiler is missing or refused; the message is its own."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A compiler and how it is called. `machine` says for which instruction sets."""

    compiler: str
    openmp: str
    """Path of the OpenMP runtime that torch has loaded: linking against another one would give two pools of threads."""
    machine: tuple[str, ...] = NATIVE

    def key(self) -> str:
        """Changes with the sources, the flags, the compiler, the runtime and the CPU."""
        digest = hashlib.sha256()
        for source in sorted(SOURCES.iterdir()):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        stat = os.stat(self.compiler)
        parts = (*FLAGS, *self.machine, os.path.realpath(self.compiler), stat.st_size, int(stat.st_mtime), self.openmp)
        digest.update("\0".join(map(str, (*parts, fingerprint()))).encode())
        return digest.hexdigest()[:24]


def find_recipe(openmp: str) -> Recipe:
    """The recipe for this machine. Raises `BuildFailed` where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler was found")
    return Recipe(compiler, openmp)


def build(recipe: Recipe) -> Path:
    """The library's path; compiles it if the cache doesn't have it. Safe against several processes at once."""
    folder = cache_directory() / "kernels"
    folder.mkdir(exist_ok=True)
    target = folder / f"bough_cpu_{recipe.key()}.so"
    if target.exists():
        return target
    _sweep(folder)
    log.info("compiling the CPU kernels (once for this machine, some seconds)")
    workplace = Path(tempfile.mkdtemp(dir=folder, prefix=_WORKPLACE))
    try:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [workplace / f"{source.stem}.o" for source in sources]
        commands = [
            [recipe.compiler, *FLAGS, *recipe.machine, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max(1, min(4, processor().logical_cpus))) as pool:
            list(pool.map(_run, commands))
        draft = workplace / "library.so"
        _run([recipe.compiler, "-shared", *map(str, objects), recipe.openmp, "-lpthread", "-o", str(draft)])
        os.replace(draft, target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return target


def _sweep(folder: Path) -> None:
    """Removes what compilations left behind that were killed: nothing has been written there for longer than one takes."""
    for workplace in folder.glob(f"{_WORKPLACE}*"):
        with contextlib.suppress(OSError):
            if time.time() - workplace.stat().st_mtime > 2 * TIMEOUT_S:
                shutil.rmtree(workplace, ignore_errors=True)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(str(error)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildFailed(lines[0] if lines else f"{command[0]} ended with {done.returncode}")
