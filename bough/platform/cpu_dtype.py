"""Which dtype the CPU multiplies fastest: measured once per machine, then cached on disk."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import time
from typing import Literal

from bough.platform.disk_cache import recall, remember
from bough.platform.processor import fingerprint

CpuDtype = Literal["float32", "bfloat16"]

_TOKENS, _WIDTH, _ROUNDS = 256, 1024, 5
_LONGEST_S = 60.0
_MARGIN = 1.15
"""Factor by which bf16 must be faster than float32 to be chosen. It also halves the memory that decoding reads, but it
rounds, so that a small gain is not enough."""


def fastest_dtype() -> CpuDtype:
    """The dtype whose matrix product, with the shape of a prefill, is faster on this machine. If that is not cached and
    this process has not imported torch, a child process measures it."""
    key = f"{fingerprint()} | torch {importlib.metadata.version('torch')}"
    known = recall("cpu_dtype", key)
    if known in ("float32", "bfloat16"):
        return known  # type: ignore[no-any-return]
    chosen = measure() if "torch" in sys.modules else measure_apart()
    remember("cpu_dtype", key, chosen)
    return chosen


def measure_apart() -> CpuDtype:
    """As `measure`, in a child process with a prepared environment. A dtype that crashes the child is not chosen."""
    code = (
        "from bough.platform.environment import prepare_environment; prepare_environment();"
        "from bough.platform.cpu_dtype import measure; print(measure())"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "float32"
    return "bfloat16" if done.stdout.split()[-1:] == ["bfloat16"] else "float32"


def measure() -> CpuDtype:
    """Times both dtypes, which takes some tens of milliseconds. The environment must be prepared (see
    `prepare_environment`)."""
    import torch

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(_TOKENS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
        torch.nn.functional.linear(x, w)
        rounds = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            torch.nn.functional.linear(x, w)
            rounds.append(time.perf_counter() - start)
        seconds[dtype] = min(rounds)
    return "bfloat16" if seconds[torch.bfloat16] * _MARGIN < seconds[torch.float32] else "float32"
