"""The loaded library, which every kernel of the process shares: one that came with the package, or compiled on first use."""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache
from pathlib import Path

import torch

from bough.kernels.cpu_build.compiler import Recipe, build, find_recipe
from bough.kernels.cpu_build.compiling import BuildFailed
from bough.platform.prebuilt import prebuilt_kernels
from bough.platform.processor import processor

log = logging.getLogger("bough.kernels")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types that the kernels read and write, by their number in the C++ code."""

_forbidden = False
_building = threading.Lock()


def forbid_custom_kernels() -> None:
    """From now on, and before any kernel was used, this process computes with torch's own kernels only."""
    global _forbidden
    _forbidden = True
    library.cache_clear()


def custom_kernels_allowed() -> bool:
    return not _forbidden


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it can't be had; then one warning says why."""
    if _forbidden:
        return None
    try:
        with _building:  # of threads that ask first at the same time, the others find it in the cache
            share_openmp()
            return _prebuilt() or _built(find_recipe())
    except (BuildFailed, OSError) as error:
        log.warning("CPU kernels could not be compiled, so torch's own are used, which are slower: %s", error)
        return None


def _prebuilt() -> ctypes.CDLL | None:
    path = prebuilt_kernels(processor().flags)
    if path is None:
        return None
    try:
        return load(path)
    except (OSError, AttributeError) as error:
        log.warning("the CPU kernels that came with the package can't be used, so they are compiled: %s", error)
        return None


def _built(recipe: Recipe) -> ctypes.CDLL:
    path = build(recipe)
    try:
        return load(path)
    except OSError as error:  # a loss of power may have left an empty one
        log.info("the CPU kernels in %s are broken and compiled again: %s", path, error)
        path.unlink(missing_ok=True)
        return load(build(recipe))


def load(path: Path) -> ctypes.CDLL:
    """Opens a built library and declares its functions."""
    loaded = ctypes.CDLL(str(path))
    pointer, i64, i32, u32, f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float
    declared: dict[str, tuple[tuple[type, ...], type | None]] = {
        "bough_packed_quant_bytes": ((pointer,), i64),
        "bough_packed_scale_bytes": ((pointer,), i64),
        "bough_pack": ((pointer, pointer), None),
        "bough_dequantise": ((pointer, pointer), None),
        "bough_packed_rows": ((pointer, pointer, i64, pointer, i32), None),
        "bough_packed_linear": ((pointer, pointer, pointer, pointer, i64, i64, i64, i32, i32, i32), None),
        "bough_experts": ((pointer, pointer, i64, pointer, pointer, pointer, i64, i64, i32), None),
        "bough_linear_rows": ((pointer,) * 4 + (i64,) * 5 + (i32,), None),
        "bough_rms_norm": ((pointer, i64, pointer, i64, *(pointer,) * 3, i64, i64, f32, f32, i32, i32), None),
        "bough_rope": ((pointer,), None),
        "bough_gated": ((pointer, i64, pointer, i64, i64, i32, i32), None),
        "bough_attention": ((pointer, pointer), None),
        "bough_attention_rope": ((pointer, pointer, pointer), None),
        "bough_decoder_stack": ((pointer, i64, *(pointer,) * 5, i64, i64), None),
        "bough_sample": ((pointer,), None),
        "bough_arrive": ((pointer, u32), None),
        "bough_await": ((pointer, i32, u32, i64, i64), i32),
        "bough_ordered_sum": ((i32, pointer, i64, i32, pointer, i64), None),
    }
    for name, (arguments, result) in declared.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = result
    return loaded


def share_openmp() -> None:
    """Lets libraries that are loaded from now on call torch's OpenMP runtime. Raises `BuildFailed` if torch brought none."""
    ctypes.CDLL(openmp_runtime(), mode=ctypes.RTLD_GLOBAL)  # it is loaded already: this makes its names visible to all


def openmp_runtime() -> str:
    """Path of the OpenMP runtime in this process, which torch brought."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rsplit(None, 1)[-1]
        if Path(path).name.startswith("libgomp"):
            return path
    raise BuildFailed("torch runs without GNU's OpenMP here")


def load_for(machine: tuple[str, ...]) -> ctypes.CDLL:
    """The library compiled for other instruction sets than this machine's best; for comparisons."""
    share_openmp()
    return load(build(Recipe(find_recipe().compiler, machine)))
