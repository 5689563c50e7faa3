"""Packed weights on the CPU, interleaved for SIMD by the compiled kernels."""

from __future__ import annotations

import ctypes
import sys
from threading import Lock

import torch
from torch import Tensor

from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES
from bough.kernels.packed_linear import reference
from bough.kernels.packed_linear.codes import TABLES, CodeKind, Codes, activation_order, in_order, out_of_order
from bough.kernels.packed_linear.weight import PackedWeight
from bough.platform.huge_pages import PAGE_BYTES, prefer_huge_pages

_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")
"""In the order of the C++ enumeration..."""
_CODED = ("int4", "int4_zero", "int8", "int8_zero", "float4", "float4_halves", "table4", "float8")
"""...and those that follow there."""
ROWS_OF_FLOATS = {
    dtype: len(_KINDS) + len(_CODED) + place
    for place, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32))
}
"""Numbers of the kinds that are not packed: rows as a checkpoint has them."""
_ALIGN = 64
_ROWS = 16
"""Of a group, in the C++ code..."""
_COLS = 32
"""...and columns of a block."""


class Weight(ctypes.Structure):
    """`struct Weight` of the C++ code."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("scale_dtype", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("quants", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("scale_blocks", ctypes.c_int64),
        ("row_scale", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
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


def pack_codes(codes: Codes) -> PackedWeight:
    """Packed for the compiled kernels if the scales' groups are whole blocks there; by the reference otherwise."""
    codes = codes.sorted().by_row()
    kind = _coded_kind(codes)
    if kind is None:
        return reference.pack_codes(codes)
    rows, cols = codes.shape
    loaded = _loaded()
    groups = max(1, codes.group // _COLS)
    handle = Weight(
        kind=len(_KINDS) + _CODED.index(kind),
        scale_dtype=DTYPES[codes.scale_OG.dtype],
        rows=rows,
        cols=cols,
        scale_blocks=min(groups, cols // _COLS),
    )
    address = ctypes.addressof(handle)
    data = [
        _arena.take(loaded.bough_packed_quant_bytes(address)),
        _arena.take(loaded.bough_packed_scale_bytes(address)),
    ]
    handle.quants, handle.scales = data[0].data_ptr(), data[1].data_ptr()
    data[1].copy_(_interleaved_scales(codes, halves=kind == "float4_halves"))
    if codes.row_scale_O is not None:
        data.append(torch.nn.functional.pad(codes.row_scale_O.float(), (0, -rows % _ROWS)).contiguous())
        handle.row_scale = data[-1].data_ptr()
    if kind == "table4":
        data.append(torch.tensor(TABLES[codes.kind]))
        handle.table = data[-1].data_ptr()
    values = codes.values_OD.view(torch.uint8).contiguous()
    loaded.bough_pack(address, values.data_ptr())
    return PackedWeight(
        codes.kind,
        rows,
        codes.num_inputs,
        tuple(data),
        functions=sys.modules[__name__],
        handle=handle,
        address=address,
        order=activation_order(codes),
        inputs=codes.inputs,
    )


def _coded_kind(codes: Codes) -> str | None:
    """The C++ code's name of a kind; None if it has none for groups like these."""
    whole = codes.shape[1] % _COLS == 0 and (codes.group % _COLS == 0 or codes.group >= codes.shape[1])
    if codes.kind == "float4" and codes.group == _COLS // 2 and codes.shape[1] % _COLS == 0:
        return "float4_halves"
    if not whole:
        return None
    names: dict[CodeKind, str] = {"nf4": "table4", "bnb_fp4": "table4"}
    name = names.get(codes.kind, codes.kind)
    return name if codes.zero_OG is None else f"{name}_zero"


def _interleaved_scales(codes: Codes, *, halves: bool) -> Tensor:
    """uint8: for each group of rows and each scale 16 scales (32 if `halves`: two columns of scales), then zero points."""
    parts = [_by_row_group(codes.scale_OG, 2 if halves else 1)]
    if codes.zero_OG is not None:
        parts.append(_by_row_group(codes.zero_OG, 1))
    return torch.cat(parts, -1).flatten()


def _by_row_group(scales: Tensor, together: int) -> Tensor:
    """uint8 [groups of rows, scales / together, bytes], of `together` runs of 16 rows each."""
    rows, count = scales.shape
    padded = torch.nn.functional.pad(scales, (0, 0, 0, -rows % _ROWS))
    by_group = padded.view(-1, _ROWS, count // together, together).permute(0, 2, 3, 1)
    return by_group.contiguous().view(torch.uint8).view(by_group.shape[0], count // together, -1)


def packed_linear(
    x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None = None, *, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    if x_TD.dim() != 2:
        made = packed_linear(x_TD.reshape(-1, weight.cols), weight, bias_O, exact=exact)
        made = made.view(*x_TD.shape[:-1], weight.rows)
        return made if out is None else out.copy_(made)
    if x_TD.shape[1] != weight.cols:
        raise ValueError(f"activations of width {x_TD.shape[1]} meet a weight of {weight.cols} columns")
    if weight.order is not None:
        x_TD = in_order(x_TD, weight.order)
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    tokens = x_TD.shape[0]
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
    out = torch.empty((*ids_T.shape, weight.handle.cols), dtype=dtype)
    _loaded().bough_packed_rows(weight.address, ids.data_ptr(), ids.numel(), out.data_ptr(), DTYPES[dtype])
    return out if weight.order is None else out_of_order(out, weight.order, weight.cols)


def dequantise(weight: PackedWeight) -> Tensor:
    out = torch.empty((weight.rows, weight.handle.cols), dtype=torch.float32)
    _loaded().bough_dequantise(weight.address, out.data_ptr())
    return out if weight.order is None else out_of_order(out, weight.order, weight.cols)


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
        """Bytes that begin at a cache line and belong to this caller alone."""
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
        with torch.inference_mode(False):  # a piece outlives the mode in which it was asked for
            room = torch.empty(whole + PAGE_BYTES, dtype=torch.uint8)
        start = -room.data_ptr() % PAGE_BYTES
        prefer_huge_pages(room.data_ptr() + start, whole)
        return room[start : start + num_bytes]


_arena = _Arena()
