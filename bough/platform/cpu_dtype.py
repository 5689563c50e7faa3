"""Which type the CPU multiplies fastest: asked of the machine once, then remembered."""

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
"""bf16 also halves the memory that decoding reads, but rounds: it must win clearly."""


def fastest_dtype() -> CpuDtype:
    """The type whose matrix product of prefill's shape is faster here. Where that isn't known yet and this process has not
    imported torch, another one finds out."""
    key = f"{fingerprint()} | torch {importlib.metadata.version('torch')}"
    known = recall("cpu_dtype", key)
    if known in ("float32", "bfloat16"):
        return known  # type: ignore[no-any-return]
    chosen = measure() if "torch" in sys.modules else measure_apart()
    remember("cpu_dtype", key, chosen)
    return chosen


def measure_apart() -> CpuDtype:
    """As `measure`, in a process whose environment is prepared. What kills that process is no type to compute with."""
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
    """Times both; takes some tens of milliseconds. The environment must be prepared (see `prepare_environment`)."""
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
