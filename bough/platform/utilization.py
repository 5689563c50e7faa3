"""How busy the device is, asked about once a second: a GPU by its management library, a CPU by this process's own time."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from bough.platform.cuda_driver import open_nvml


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


def gpu_utilization(index: int = 0) -> Callable[[], float] | None:
    """Reads the share of the last moments in which a kernel ran. None where the driver can't be asked."""
    opened = open_nvml(index)
    if opened is None:
        return None
    nvml, handle = opened

    def read() -> float:
        rates = _Rates()
        failed = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates))
        return 0.0 if failed else min(1.0, rates.gpu / 100)

    return read


def cpu_utilization() -> Callable[[], float]:
    """Reads the share of all cores' time that this process has used since the last reading."""
    cores = len(os.sched_getaffinity(0))
    before = [time.monotonic(), time.process_time()]

    def read() -> float:
        wall, used = time.monotonic(), time.process_time()
        passed, spent = wall - before[0], used - before[1]
        before[:] = wall, used
        return min(1.0, spent / (passed * cores)) if passed > 0 else 0.0

    return read
