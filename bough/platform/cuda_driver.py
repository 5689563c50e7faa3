"""Facts about a GPU from the CUDA driver, without torch; and its context, created only on request."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_MULTIPROCESSORS = 16
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    num_sms: int
    num_devices: int


class _MemoryInfo(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def query_gpu(index: int = 0) -> Gpu | None:
    """The GPU that CUDA numbers `index` (CUDA_VISIBLE_DEVICES respected), or None."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value <= index:
        return None
    if cuda.cuDeviceGet(ctypes.byref(device), index):
        return None

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device) else value.value

    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    total = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        capability=(attribute(_MAJOR), attribute(_MINOR)),
        total_bytes=total.value,
        free_bytes=_free_bytes(index) or total.value,
        num_sms=attribute(_MULTIPROCESSORS),
        num_devices=count.value,
    )


def open_context(index: int = 0) -> bool:
    """Creates the GPU's primary context, which torch then finds. Takes a large part of a second in the driver alone, so
    that it is done while torch is imported. Returns False if it cannot be created; torch will report the reason."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        return False
    return not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def open_nvml(index: int = 0) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The management library, which needs no context, and its handle of the GPU that CUDA numbers `index`."""
    try:
        cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, uuid, handle = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid(uuid, device):
        return None
    digits = bytes(uuid).hex()
    text = f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    if nvml.nvmlInit_v2():
        return None
    if nvml.nvmlDeviceGetHandleByUUID(text.encode(), ctypes.byref(handle)):
        nvml.nvmlShutdown()
        return None
    return nvml, handle


def _free_bytes(index: int) -> int | None:
    """Free memory by the management library; matched by the device's unique id."""
    opened = open_nvml(index)
    if opened is None:
        return None
    nvml, handle = opened
    info = _MemoryInfo()
    try:
        return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(info)) else int(info.free)
    finally:
        nvml.nvmlShutdown()
