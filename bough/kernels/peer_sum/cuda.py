"""The kernels of `cuda.cu`, and the memory that they share between processes by CUDA IPC."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bough.kernels.choices import facts_of
from bough.kernels.cuda_source import CudaKernel, cached_cubin, check, current_stream, on_device
from bough.kernels.peer_sum import HALF_BYTES, shots

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_THREADS: Final = 512
_BLOCKS: Final = 36
"""All of them have to run at once, beside those of the other ranks where ranks share a device."""
MOST_RANKS: Final = 8
_MOST_ROW_VECTORS: Final = 4 * _THREADS
"""Of 16 bytes, in a row that a block norms."""
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DATA_AT: Final = -(-(2 * _BLOCKS * MOST_RANKS * 4 + _BLOCKS * 4) // 128) * 128
MEMORY_BYTES: Final = _DATA_AT + 4 * HALF_BYTES
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Peers(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p * MOST_RANKS),)


class _NormSettings(ctypes.Structure):
    _fields_ = (("eps", ctypes.c_float), ("offset", ctypes.c_float))


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class PeerMemory:
    """A rank's memory on its device, which other processes of the machine may open. It begins as zeros."""

    def __init__(self, device: torch.device) -> None:
        """Raises `CudaSourceError` if there is none."""
        self.device = device
        pointer = ctypes.c_void_p()
        with on_device(device) as driver:
            check(driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(MEMORY_BYTES)), "memory for sums")
            check(driver.cuMemsetD8_v2(pointer, ctypes.c_ubyte(0), ctypes.c_size_t(MEMORY_BYTES)), "clearing it")
            check(driver.cuCtxSynchronize(), "clearing it")
        assert pointer.value is not None
        self.address: int = pointer.value
        self._opened: list[int] = []

    def handle(self) -> bytes:
        """By which another process opens it. Raises `CudaSourceError` where processes can't share memory."""
        found = _Handle()
        with on_device(self.device) as driver:
            check(driver.cuIpcGetMemHandle(ctypes.byref(found), ctypes.c_void_p(self.address)), "sharing memory")
        return bytes(found.bytes)

    def open(self, handle: bytes) -> int:
        """The address of another process's memory. Raises `CudaSourceError`, say because devices can't reach one another."""
        given, pointer = _Handle((ctypes.c_ubyte * 64)(*handle)), ctypes.c_void_p()
        with on_device(self.device) as driver:
            opened = driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), given, _LAZY_PEER_ACCESS)
            check(opened, "another rank's memory")
        assert pointer.value is not None
        self._opened.append(pointer.value)
        return pointer.value

    def close(self) -> None:
        """Once no rank uses any of it."""
        with on_device(self.device) as driver:
            for each in self._opened:
                driver.cuIpcCloseMemHandle(ctypes.c_void_p(each))
            driver.cuMemFree_v2(ctypes.c_void_p(self.address))


@cache
def _kernel(name: str, device: torch.device, num_ranks: int, dtype: torch.dtype) -> CudaKernel:
    major, minor = facts_of(device.type, device.index).capability
    defines = {
        "RANKS": num_ranks, "THREADS": _THREADS, "BLOCKS": _BLOCKS, "DTYPE": _DTYPES[dtype], "HALF_BYTES": HALF_BYTES,
    }  # fmt: skip
    cubin = cached_cubin(_SOURCE, f"sm_{major}{minor}", defines)
    return CudaKernel(cubin, name, device, threads=_THREADS, shared_bytes=0)


class PeerSum:
    """One rank's end. Calls are queued on the current stream, also in a graph's capture; all ranks make the same ones."""

    def __init__(self, addresses: Sequence[int], rank: int, device: torch.device) -> None:
        """`addresses`: of all ranks' memory, in their order. Raises `CudaSourceError` if the kernels can't be had."""
        self._peers = _Peers((ctypes.c_void_p * MOST_RANKS)(*addresses))
        self._rank, self._size = rank, len(addresses)
        self._device = device
        for name in ("one_shot", "two_shot", "one_shot_norm"):
            _kernel(name, device, self._size, torch.bfloat16)

    def takes(self, x: Tensor) -> bool:
        """Whether it can sum such tensors."""
        return (
            x.dtype in _DTYPES
            and x.is_contiguous()
            and 0 < x.nbytes <= HALF_BYTES
            and x.nbytes % 16 == 0
            and x.data_ptr() % 16 == 0
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of a tensor for which `takes`, in place."""
        name = "one_shot" if shots(self._size, x.nbytes) == "one" else "two_shot"
        kernel = _kernel(name, self._device, self._size, x.dtype)
        arguments = (self._peers, x, x, self._rank, x.nbytes // 16)
        kernel.launch(_BLOCKS, arguments, current_stream(self._device), early=False)
        return x

    def takes_norm(self, x_TD: Tensor) -> bool:
        """Whether `add_norm` takes it, and pays: one shot."""
        width = x_TD.shape[-1] * x_TD.element_size()
        fits = width % 16 == 0 and width // 16 <= _MOST_ROW_VECTORS
        return fits and self.takes(x_TD) and shots(self._size, x_TD.nbytes) == "one"

    def add_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.norm.add_rms_norm` of the sum of `x_TD` over ranks, rounded to its dtype before it is added."""
        normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        kernel = _kernel("one_shot_norm", self._device, self._size, x_TD.dtype)
        width = x_TD.shape[1] * x_TD.element_size() // 16
        arguments = (
            self._peers, x_TD, residual_TD, weight_D, normed_TD, total_TD, self._rank, len(x_TD), width,
            _NormSettings(eps, offset),
        )  # fmt: skip
        kernel.launch(_BLOCKS, arguments, current_stream(self._device), early=False)
        return normed_TD, total_TD
