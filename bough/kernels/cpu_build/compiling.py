"""From the C++ sources to a shared library. Standard library only: the build of a wheel loads this file by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    "-std=c++20", "-O2", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-w",
)  # fmt: skip
COPIES = ("-mmove-max=256", "-mstore-max=256")
"""For CPUs without AVX-512, whose registers hold half of the kernels' vectors: copies between them are made of whole
registers. GCC (12 and later) would make them of 16 bytes each, and the default model decodes 1.9 times, and prefills 1.25
times as fast without that (AMD Zen 3)."""
LINK_FLAGS = ("-shared", "-s", "-lpthread")
"""No OpenMP runtime is linked. The process has torch's (a second one would be a second pool of threads), and torch's file
has another name in every build of torch; the two functions that the kernels call are found when they are loaded."""
TIMEOUT_S = 900.0
"""For one call of the compiler. The largest file takes 20 s of a core, 40 s of a slow one; beside twenty busy processes
300 s were not enough."""
WORKPLACE = ".build-"
"""How the names of temporary directories begin."""


class BuildFailed(Exception):
    """The compiler is missing or refused; the message is its own."""


def compile_library(compiler: str, machine: tuple[str, ...], target: Path, *, sources: Path, jobs: int) -> None:
    """Compiles every .cpp file of `sources` with the flags `machine`, at most `jobs` at a time, and links them to `target`.

    `target` appears in one move. Raises `BuildFailed`; then nothing is left behind.
    """
    workplace = Path(tempfile.mkdtemp(dir=target.parent, prefix=WORKPLACE))
    machine += copy_flags(compiler, machine)
    try:
        files = sorted(sources.glob("*.cpp"))
        objects = [workplace / f"{file.stem}.o" for file in files]
        commands = [
            [compiler, *FLAGS, *machine, "-c", str(file), "-o", str(made)]
            for file, made in zip(files, objects, strict=True)
        ]
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            list(pool.map(run, commands))
        draft = workplace / "library.so"
        run([compiler, *map(str, objects), *LINK_FLAGS, "-o", str(draft)])
        os.replace(draft, target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def copy_flags(compiler: str, machine: tuple[str, ...]) -> tuple[str, ...]:
    """`COPIES`, if the compiler knows them and the build is not for AVX-512."""
    command = [compiler, *machine, *COPIES, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return COPIES if done.returncode == 0 and "__AVX512F__" not in done.stdout else ()


def run(command: list[str]) -> None:
    """Runs a compiler. Raises `BuildFailed` with the first error that it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(str(error)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildFailed(lines[0] if lines else f"{command[0]} ended with {done.returncode}")
