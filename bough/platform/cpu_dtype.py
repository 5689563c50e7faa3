"""Which type the CPU multiplies fastest: asked of the machine once, then remembered."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Literal

from bough.platform.disk_cache import recall, remember
from bough.platform.processor import fingerprint

CpuDtype = Literal["float32", "bfloat16"]

_TOKENS, _WIDTH, _ROUNDS = 256, 1024, 5
_MARGIN = 1.15
"""bf16 also halves the memory that decoding reads, but rounds: it must win clearly."""


def fastest_dtype() -> CpuDtype:
    """The type whose matrix product of prefill's shape is faster here. Imports torch only where it isn't known yet."""
    key = f"{fingerprint()} | torch {importlib.metadata.version('torch')}"
    known = recall("cpu_dtype", key)
    if known in ("float32", "bfloat16"):
        return known  # type: ignore[no-any-return]
    chosen = measure()
    remember("cpu_dtype", key, chosen)
    return chosen


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
