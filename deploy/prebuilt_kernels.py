"""Build hook of the wheel: with BOUGH_PREBUILT=1 it compiles the CPU kernels into it, for Linux on x86-64.

Without that variable the wheel is pure Python: it works on every platform, and compiles the kernels on first use where
there is a compiler. `deploy/build_wheels.py` makes both.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GLIBC = (2, 34)
"""The oldest C library that the wheel promises to run with: Debian 12, Ubuntu 22.04, RHEL 9."""
TAG = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"
"""One wheel for all Pythons: the kernels are called through ctypes."""
MOST = {"GLIBC": GLIBC, "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11, 0, 0)}
"""Newest versions of symbols that the manylinux_2_34 policy allows."""
ALLOWED = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "ld-linux-x86-64.so.2"}
"""Libraries that every Linux system of that age has."""


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds compiled kernels to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("BOUGH_PREBUILT") != "1" or version == "editable":
            return
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            raise RuntimeError("prebuilt kernels are for Linux on x86-64; leave BOUGH_PREBUILT out")
        root = Path(self.root)
        variants = _by_path("bough_prebuilt", root / "bough/platform/prebuilt.py")
        compiling = _by_path("bough_compiling", root / "bough/kernels/cpu_build/compiling.py")
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if not compiler:
            raise RuntimeError("prebuilt kernels need a C++ compiler: install g++, or leave BOUGH_PREBUILT out")
        self.made = Path(tempfile.mkdtemp(prefix="bough-kernels-"))
        for variant in variants.VARIANTS:
            target = self.made / variant.file_name
            jobs = os.cpu_count() or 1
            compiling.compile_library(compiler, variant.machine, target, sources=compiling.SOURCES, jobs=jobs)
            check_portable(target)
            self.app.display_info(f"compiled {target.name}: {target.stat().st_size:,} bytes")
            build_data["force_include"][str(target)] = f"bough/kernels/cpu_build/prebuilt/{target.name}"
        build_data["pure_python"] = False
        build_data["tag"] = TAG

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if made := getattr(self, "made", None):
            shutil.rmtree(made)


def check_portable(library: Path) -> None:
    """Raises RuntimeError if `library` needs more than the tag promises."""
    listing = subprocess.run(["readelf", "-dVW", str(library)], capture_output=True, text=True, check=True).stdout
    if foreign := set(re.findall(r"\(NEEDED\).*\[(.+)\]", listing)) - ALLOWED:
        raise RuntimeError(f"{library.name} needs {', '.join(sorted(foreign))}, which not every Linux system has")
    for family, number in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", listing):
        if tuple(map(int, number.split("."))) > MOST[family]:
            raise RuntimeError(f"{library.name} needs {family}_{number}, newer than {TAG} promises")


def _by_path(name: str, path: Path) -> ModuleType:
    """A module of the package, without importing the package: its dependencies are not there while a wheel is built."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
