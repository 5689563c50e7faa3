"""Experts on the CPU, grouped, by the compiled kernels: plain weights as the checkpoint has them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from bough.kernels import moe
from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES
from bough.kernels.moe import reference
from bough.kernels.packed_linear.cpu import ROWS_OF_FLOATS, Weight

ACTIVATIONS: Final = {"silu": 0, "gelu_tanh": 1}
CLAMPED: Final = 2
_COLS: Final = 32
"""Columns of a block in the C++ code; also a multiple of what rows come in."""


class ExpertsStruct(ctypes.Structure):
    """`struct Experts` of the C++ code."""

    _fields_ = [
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("gate_up_order", ctypes.c_void_p),
        ("down_order", ctypes.c_void_p),
        ("experts", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    ]


def available() -> bool:
    return library() is not None


class Stack:
    """A layer's experts for `bough_experts`: where each one's weights are."""

    def __init__(self, gate_up: Sequence[int], down: Sequence[int], width: int, inner: int) -> None:
        """Addresses of `Weight` structures, which the caller keeps alive."""
        count = len(gate_up)
        self._pointers = (ctypes.c_void_p * count)(*gate_up), (ctypes.c_void_p * count)(*down)
        self.call = ExpertsStruct(
            gate_up=ctypes.addressof(self._pointers[0]),
            down=ctypes.addressof(self._pointers[1]),
            experts=count,
            width=width,
            inner=inner,
        )

    def run(self, x_TD: Tensor, topk_weights_Tk: Tensor, topk_ids_Tk: Tensor, **options: float | None) -> Tensor:
        """[T, D]. `options`: fields of the structure, which keep their values for later calls."""
        loaded = library()
        assert loaded is not None, "the caller asked `available`"
        for name, value in options.items():
            setattr(self.call, name, value)
        x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
        ids = topk_ids_Tk.to(torch.int32).contiguous()
        weights = topk_weights_Tk.float().contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        tokens, per_token = ids.shape
        loaded.bough_experts(
            ctypes.addressof(self.call), x.data_ptr(), x.stride(0), ids.data_ptr(), weights.data_ptr(), out.data_ptr(),
            tokens, per_token, DTYPES[x.dtype],
        )  # fmt: skip
        return out


def fused_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
) -> Tensor:
    stack = _stack(x_TD, gate_up_E2FD, down_EDF)
    if stack is None or activation not in ACTIVATIONS:
        return reference.fused_experts(x_TD, gate_up_E2FD, down_EDF, topk_weights_Tk, topk_ids_Tk, activation)
    given = {"gate_up_bias": None, "down_bias": None}
    return stack.run(x_TD, topk_weights_Tk, topk_ids_Tk, activation=ACTIVATIONS[activation], **given)


def biased_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    biases: moe.Biases,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    stack = _stack(x_TD, gate_up_E2FD, down_EDF)
    if stack is None:
        return reference.biased_experts(
            x_TD, gate_up_E2FD, down_EDF, biases, topk_weights_Tk, topk_ids_Tk, alpha, limit
        )
    first, second = biases.gate_up_E2F.float().contiguous(), biases.down_ED.float().contiguous()
    given = {"gate_up_bias": first.data_ptr(), "down_bias": second.data_ptr(), "alpha": alpha, "limit": limit}
    return stack.run(x_TD, topk_weights_Tk, topk_ids_Tk, activation=CLAMPED, **given)


def _stack(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Stack | None:
    """None where the kernels don't take these sizes or types."""
    num_experts, width, inner = down_EDF.shape
    alike = x_TD.dtype in DTYPES and gate_up_E2FD.dtype == down_EDF.dtype == x_TD.dtype
    whole = width % _COLS == 0 and inner % _COLS == 0 and gate_up_E2FD.shape == (num_experts, 2 * inner, width)
    if not alike or not whole or not (gate_up_E2FD.is_contiguous() and down_EDF.is_contiguous()):
        return None
    return _plain_stack(gate_up_E2FD.data_ptr(), down_EDF.data_ptr(), num_experts, width, inner, x_TD.dtype)


@lru_cache(maxsize=1024)
def _plain_stack(gate_up: int, down: int, num_experts: int, width: int, inner: int, dtype: torch.dtype) -> Stack:
    """Of weights at these addresses. What is kept for later calls are numbers alone, right for whatever lies there."""
    kind, item = ROWS_OF_FLOATS[dtype], dtype.itemsize
    held = (Weight * (2 * num_experts))()
    for expert in range(num_experts):
        held[2 * expert] = Weight(kind, 0, 2 * inner, width, gate_up + expert * 2 * inner * width * item)
        held[2 * expert + 1] = Weight(kind, 0, width, inner, down + expert * width * inner * item)
    size = ctypes.sizeof(Weight)
    at = [ctypes.addressof(held) + place * size for place in range(2 * num_experts)]
    stack = _Plain(at[::2], at[1::2], width, inner)
    stack.held = held
    return stack


class _Plain(Stack):
    """Keeps its structures."""

    held: object
