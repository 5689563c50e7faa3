"""In which order ranks get the GPUs of a machine: neighbours in number should be neighbours in wiring. Needs no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from bough.platform.cuda_driver import open_nvml, query_gpu

_NVLINK: Final = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_UNKNOWN: Final = 60
_WAYS: Final = {
    0: "NVLink",
    1: "the same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one host bridge",
    40: "one NUMA node",
    50: "another NUMA node",
    _UNKNOWN: "an unknown way",
}
"""By distance: 0, or what NVML calls the level of the common ancestor (its 0 is 1 here)."""


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """GPUs as CUDA numbers them, in the order in which ranks get them, and why."""

    devices: tuple[int, ...]
    because: str


def order_devices(distances: Sequence[Sequence[int]]) -> DeviceOrder:
    """From GPU 0 on, the next is always the nearest to the last that is left, the lowest number among several: ranks that
    split a layer have consecutive numbers. `distances`: between each two GPUs."""
    order = [0]
    left = list(range(1, len(distances)))
    while left:
        nearest = min(left, key=lambda each: (distances[order[-1]][each], each))
        order.append(nearest)
        left.remove(nearest)
    if order == sorted(order):
        return DeviceOrder(tuple(order), "neighbours in number are the nearest")
    at = next(place for place, device in enumerate(order) if place != device)
    way = _WAYS.get(distances[order[at - 1]][order[at]], _WAYS[_UNKNOWN])
    return DeviceOrder(tuple(order), f"GPUs {order[at - 1]} and {order[at]} are joined by {way}")


@cache
def device_order() -> DeviceOrder:
    """Of this machine, as far as CUDA_VISIBLE_DEVICES shows it; as CUDA numbers them where the driver can't say more."""
    gpu = query_gpu()
    count = 0 if gpu is None else gpu.num_devices
    if count < 3:  # with two there is one pair
        return DeviceOrder(tuple(range(count)), "there are no pairs to choose from")
    found = [open_nvml(index) for index in range(count)]
    handles = [each for each in found if each is not None]
    try:
        if len(handles) < count:
            return DeviceOrder(tuple(range(count)), "the driver does not say how GPUs are joined")
        nvml = handles[0][0]
        return order_devices([[_distance(nvml, a, b) for _, b in handles] for _, a in handles])
    finally:
        for nvml, _ in handles:  # opened as often
            nvml.nvmlShutdown()


def _distance(nvml: ctypes.CDLL, a: ctypes.c_void_p, b: ctypes.c_void_p) -> int:
    if a.value == b.value:
        return 0
    value = ctypes.c_int(-1)
    if not nvml.nvmlDeviceGetP2PStatus(a, b, _NVLINK, ctypes.byref(value)) and value.value == 0:
        return 0
    if nvml.nvmlDeviceGetTopologyCommonAncestor(a, b, ctypes.byref(value)):
        return _UNKNOWN
    return max(1, value.value)
