"""What the packed kernels compute, in plain torch: blocks are unpacked some rows at a time, in float32."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.packed_linear.codes import Codes, activation_order, dequantise_codes, out_of_order
from bough.kernels.packed_linear.weight import FORMATS, PackedWeight

CHUNK_VALUES = 4 * 1024 * 1024
"""Weights that are unpacked at a time: their floats take 16 MiB."""


def pack(kind: str, raw: Tensor, cols: int) -> PackedWeight:
    return PackedWeight(kind, raw.shape[0], cols, (raw.clone(),), functions=sys.modules[__name__])


def pack_codes(codes: Codes) -> PackedWeight:
    """Kept as they are: a byte per weight."""
    return PackedWeight(
        codes.kind,
        codes.shape[0],
        codes.num_inputs,
        (codes.values_OD, codes.scale_OG),
        functions=sys.modules[__name__],
        handle=codes.by_row(),
        inputs=codes.inputs,
    )


def packed_linear(
    x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None = None, *, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = x_TD.new_empty((*x_TD.shape[:-1], weight.rows))
    x = x_TD.float()
    step = max(1, CHUNK_VALUES // weight.cols)
    for first in range(0, weight.rows, step):
        rows = slice(first, first + step)
        bias = None if bias_O is None else bias_O[rows].float()
        out[..., rows] = F.linear(x, _some_rows(weight, rows), bias).to(out.dtype)
    return out


def packed_rows(ids_T: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    if weight.handle is None:
        return unpack(weight.kind, weight.data[0][ids_T], weight.cols).to(dtype)
    return _taken(weight.handle, ids_T.reshape(-1)).view(*ids_T.shape, weight.cols).to(dtype)


def dequantise(weight: PackedWeight) -> Tensor:
    return _some_rows(weight, slice(None))


def _some_rows(weight: PackedWeight, rows: slice) -> Tensor:
    """float32 [some rows, cols]."""
    if weight.handle is None:
        return unpack(weight.kind, weight.data[0][rows], weight.cols)
    return _taken(weight.handle, rows)


def _taken(codes: Codes, rows: slice | Tensor) -> Tensor:
    """Some rows of codes that have scales of single rows, dequantised, columns in the order of activations."""
    values = codes.values_OD
    some = values.view(torch.uint8)[rows].view(values.dtype)  # few things can be done with floats of 8 bits
    zero, row = codes.zero_OG, codes.row_scale_O
    taken = replace(
        codes,
        values_OD=some,
        scale_OG=codes.scale_OG[rows],
        zero_OG=None if zero is None else zero[rows],
        row_scale_O=None if row is None else row[rows],
    )
    dense = dequantise_codes(taken)
    order = activation_order(codes)
    return dense if order is None else out_of_order(dense, order, codes.num_inputs)


def unpack(kind: str, raw: Tensor, cols: int) -> Tensor:
    """float32 [rows, cols] from the bytes of a checkpoint."""
    rows, form = raw.shape[0], FORMATS[kind]
    if kind in _PLAIN:
        return raw.contiguous().view(_PLAIN[kind]).float()
    blocks = raw.reshape(rows * cols // form.block, form.block_bytes)
    return _UNPACK[kind](blocks).reshape(rows, cols)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The 16-bit float at a byte of each block, [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles_of(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def bits_of(packed: Tensor, count: int) -> Tensor:
    """Bits of each byte, lowest first: [..., bytes * count]."""
    shifts = torch.arange(count, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * (nibbles_of(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * nibbles_of(b[:, 4:]).float() + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _half(b, 0) * ((nibbles_of(b[:, 6:]) | bits_of(b[:, 2:6], 8) << 4).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b, 0) * (nibbles_of(b[:, 8:]) | bits_of(b[:, 4:8], 8) << 4).float() + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].view(torch.int8).float()


def six_bits_of(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits from 12 bytes, [blocks, 8] each."""
    low, high, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (mixed & 15) | (low >> 6) << 4), -1)
    minima = torch.cat((high & 63, (mixed >> 4) | (high >> 6) << 4), -1)
    return scales, minima


def _k_blocks(b: Tensor, quants: Tensor) -> Tensor:
    scales, minima = (each.float().unsqueeze(-1) for each in six_bits_of(b[:, 4:16]))
    return _half(b, 0).unsqueeze(-1) * scales * quants.float() - _half(b, 2).unsqueeze(-1) * minima


def _q4_k(b: Tensor) -> Tensor:
    return _k_blocks(b, nibbles_of(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(b: Tensor) -> Tensor:
    low = nibbles_of(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device).view(1, 8, 1)
    return _k_blocks(b, low | ((b[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4)


def _q6_k(b: Tensor) -> Tensor:
    low = nibbles_of(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device).view(1, 1, 4, 1)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = ((low | high << 4).float() - 32).reshape(-1, 16, 16)
    return _half(b, 208).unsqueeze(-1) * b[:, 192:208].contiguous().view(torch.int8).float().unsqueeze(-1) * quants


_PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_UNPACK = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
