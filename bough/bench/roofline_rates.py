"""Rates of a device, measured by fixed code: bytes read and matrix products per second; and its clock and power."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bough.bench.roofline_workloads import DeviceRates

_SUSTAINED_S = 1.5
"""Products are repeated this long: after a pause a GPU is faster for a moment than its power allows it to be."""


def measure_rates(device: torch.device) -> DeviceRates:
    """Bandwidth of a sum over a large tensor, and the rate of large products of random numbers, sustained."""
    cuda = device.type == "cuda"
    bandwidth = _bandwidth(2**31 if cuda else 2**22, device)
    side = 8192 if cuda else 256
    dtype = torch.bfloat16 if cuda else torch.float32
    one, other = (torch.randn((side, side), dtype=dtype, device=device) for _ in range(2))
    product_s = _sustained(lambda: one @ other, device, _SUSTAINED_S if cuda else 0.05)
    return DeviceRates(bandwidth, 2.0 * side**3 / product_s)


def _bandwidth(count: int, device: torch.device) -> float:
    """Bytes per second of a sum over `count` numbers."""
    numbers = torch.randn(count, dtype=torch.bfloat16, device=device)
    return numbers.nbytes / _shortest(lambda: numbers.sum(dtype=torch.float32), device)


def _shortest(function: Callable[[], Tensor], device: torch.device) -> float:
    took = []
    for _ in range(7):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(4):
            function()
        _wait(device)
        took.append((time.perf_counter() - begin) / 4)
    return min(took)


def _sustained(function: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """Of one call, once calls have been repeated for `seconds`."""
    begin = last = time.perf_counter()
    took = 0.0
    while last - begin < seconds:
        for _ in range(16):
            function()
        _wait(device)
        now = time.perf_counter()
        took, last = (now - last) / 16, now
    return took


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_ASKED = ("clocks.sm", "power.draw", "temperature.gpu")


def device_state(device: torch.device) -> dict[str, float]:
    """Clock in MHz, power in watts, temperature in degrees; empty if not known."""
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return {}
    query = [program, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits", f"--id={device.index or 0}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        values = [float(value) for value in done.stdout.strip().split(",")]
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return dict(zip(("clock_mhz", "power_w", "temperature_c"), values, strict=True))
