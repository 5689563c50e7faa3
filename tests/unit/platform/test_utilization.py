"""How busy a device is: a CPU by this process's time, a GPU by what its driver says."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import pytest

from bough.platform import Device, cuda_driver
from bough.platform.utilization import cpu_utilization, gpu_utilization


def test_a_cpu_is_as_busy_as_this_process() -> None:
    """As its two clocks say that it is; the reading falls between two looks at them."""
    cores = len(os.sched_getaffinity(0))
    before_s, before_cpu_s = time.monotonic(), time.process_time()
    read = cpu_utilization()
    for busy_s in (0.0, 0.3):
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        while time.process_time() < began_cpu_s + busy_s:
            pass
        time.sleep(0.2)
        ended_s, ended_cpu_s = time.monotonic(), time.process_time()
        told = read()
        after_s, after_cpu_s = time.monotonic(), time.process_time()
        least = (ended_cpu_s - began_cpu_s) / (after_s - before_s) / cores
        most = (after_cpu_s - before_cpu_s) / (ended_s - began_s) / cores
        assert least * 0.99 <= told <= most * 1.01
        assert told > 0.01 if busy_s else told < 0.2
        before_s, before_cpu_s = ended_s, ended_cpu_s
    assert Device("cpu").utilization() is not None


class FakeDriver:
    """Both libraries; notes the id that it was asked for."""

    def __init__(self, percent: int = 73, broken: str = "") -> None:
        self.percent = percent
        self.broken = broken
        self.asked = b""
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if name == self.broken:
            return lambda *_: 1
        return lambda *_: 0

    def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:
        uuid[:] = range(16)
        return int(self.broken == "cuDeviceGetUuid")

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, text: bytes, handle: Any) -> int:
        self.asked = text
        return int(self.broken == "nvmlDeviceGetHandleByUUID")

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        ctypes.cast(rates, ctypes.POINTER(ctypes.c_uint))[0] = self.percent
        return int(self.broken == "nvmlDeviceGetUtilizationRates")


def test_a_gpu_is_found_by_its_own_id(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: driver)
    read = gpu_utilization(1)
    assert read is not None
    assert driver.asked == b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert read() == pytest.approx(0.73)
    driver.percent = 0
    assert read() == 0.0


@pytest.mark.parametrize("broken", ["cuInit", "cuDeviceGet", "cuDeviceGetUuid", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    driver = FakeDriver(broken=broken)
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: driver)
    assert gpu_utilization() is None
    assert driver.open == 0


def test_a_reading_that_fails_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(broken="nvmlDeviceGetUtilizationRates")
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: driver)
    read = gpu_utilization()
    assert read is not None
    assert read() == 0.0


def test_no_library_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    assert gpu_utilization() is None
