"""Packed weights on the CPU, interleaved for SIMD by the compiled kernels."""

from __future__ import annotations

import ctypes
import sys
from threading import Lock

import torch
from torch import Tensor

from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES
from bough.kernels.packed_linear.weight import PackedWeight
from bough.platform.huge_pages import PAGE_BYTES, prefer_huge_pages

_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")
"""In the order of the C++ enumeration."""
_ALIGN = 64


class Weight(ctypes.Structure):
    """`struct Weight` of the C++ code."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("quants", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    ]


def available() -> bool:
    return library() is not None


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "packed for kernels that are not there"
    return loaded


def pack(kind: str, raw: Tensor, cols: int) -> PackedWeight:
    loaded = _loaded()
    handle = Weight(kind=_KINDS.index(kind), rows=raw.shape[0], cols=cols)
    address = ctypes.addressof(handle)
    quants = _arena.take(loaded.bough_packed_quant_bytes(address))
    scales = _arena.take(loaded.bough_packed_scale_bytes(address))
    handle.quants, handle.scales = quants.data_ptr(), scales.data_ptr()
    raw = raw.contiguous()
    loaded.bough_pack(address, raw.data_ptr())
    return PackedWeight(
        kind,
        raw.shape[0],
        cols,
        (quants, scales),
        functions=sys.modules[__name__],
        handle=handle,
        address=address,
    )


def packed_linear(
    x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None = None, *, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    if x_TD.dim() != 2:
        made = packed_linear(x_TD.reshape(-1, weight.cols), weight, bias_O, exact=exact)
        made = made.view(*x_TD.shape[:-1], weight.rows)
        return made if out is None else out.copy_(made)
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    tokens = x_TD.shape[0]
    if x_TD.shape[1] != weight.cols:
        raise ValueError(f"activations of width {x_TD.shape[1]} meet a weight of {weight.cols} columns")
    if out is None:
        out = x_TD.new_empty((tokens, weight.rows))
    elif out.shape != (tokens, weight.rows) or out.stride(1) != 1:
        raise ValueError(f"out must be [{tokens}, {weight.rows}] with contiguous rows, not {tuple(out.shape)}")
    if bias_O is not None:
        bias_O = bias_O.float().contiguous()
    _loaded().bough_packed_linear(
        weight.address,
        x_TD.data_ptr(),
        out.data_ptr(),
        None if bias_O is None else bias_O.data_ptr(),
        tokens,
        x_TD.stride(0),
        out.stride(0),
        DTYPES[x_TD.dtype],
        DTYPES[out.dtype],
        exact,
    )
    return out


def packed_rows(ids_T: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    ids = ids_T.reshape(-1).to(torch.int64).contiguous()
    out = torch.empty((*ids_T.shape, weight.cols), dtype=dtype)
    _loaded().bough_packed_rows(weight.address, ids.data_ptr(), ids.numel(), out.data_ptr(), DTYPES[dtype])
    return out


def dequantise(weight: PackedWeight) -> Tensor:
    out = torch.empty((weight.rows, weight.cols), dtype=torch.float32)
    _loaded().bough_dequantise(weight.address, out.data_ptr())
    return out


class _Arena:
    """Hands out memory for weights from large pieces, so that they lie in huge pages. A piece goes with its last weight.

    Several threads load weights at once.
    """

    PIECE_BYTES = 8 * PAGE_BYTES

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = Lock()

    def take(self, num_bytes: int) -> Tensor:
        """Bytes that begin at a cache line, and are nobody else's."""
        if num_bytes > self.PIECE_BYTES // 4:
            return self._fresh(num_bytes)
        with self._lock:
            if self._used + num_bytes > self._piece.numel():
                self._piece, self._used = self._fresh(self.PIECE_BYTES), 0
            taken = self._piece[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // _ALIGN) * _ALIGN
        return taken

    def _fresh(self, num_bytes: int) -> Tensor:
        whole = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        room = torch.empty(whole + PAGE_BYTES, dtype=torch.uint8)
        start = -room.data_ptr() % PAGE_BYTES
        prefer_huge_pages(room.data_ptr() + start, whole)
        return room[start : start + num_bytes]


_arena = _Arena()
