"""Rotary embedding, with or without norms of the heads, in one pass by the compiled kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES
from bough.kernels.rotary import reference


class RopeStruct(ctypes.Structure):
    """`struct Rope` of the C++ code."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("q_out", ctypes.c_void_p),
        ("k_out", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("q_token", ctypes.c_int64),
        ("q_head", ctypes.c_int64),
        ("k_token", ctypes.c_int64),
        ("k_head", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("rotated", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("norm_dtype", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
    ]


def available() -> bool:
    return library() is not None


def apply_rope(
    q_TNH: Tensor, k_TKH: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return _rope(q_TNH, k_TKH, None, None, 0.0, positions_T, cos_sin_PR, 0.0, interleaved)


def qk_norm_rope(
    q_TNH: Tensor,
    k_TKH: Tensor,
    q_weight_H: Tensor,
    k_weight_H: Tensor,
    eps: float,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    return _rope(q_TNH, k_TKH, q_weight_H, k_weight_H, eps, positions_T, cos_sin_PR, offset, interleaved)


def _rope(
    q: Tensor,
    k: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    offset: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    loaded = library()
    q_token, q_head, q_unit = q.stride()
    k_token, k_head, k_unit = k.stride()
    plain = q_unit == 1 and k_unit == 1 and q.dtype == k.dtype and cos_sin.dtype == torch.float32
    if loaded is None or q.dtype not in DTYPES or not plain:
        if q_norm is None or k_norm is None:
            return reference.apply_rope(q, k, positions, cos_sin, interleaved=interleaved)
        return reference.qk_norm_rope(
            q, k, q_norm, k_norm, eps, positions, cos_sin, offset=offset, interleaved=interleaved
        )
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    q_out, k_out = q.new_empty((tokens, heads, dim)), q.new_empty((tokens, kv_heads, dim))
    call = RopeStruct(
        q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(),
        tokens, q_token, q_head, k_token, k_head, heads, kv_heads, dim, cos_sin.shape[1], interleaved,
        DTYPES[q.dtype], 0 if q_norm is None else DTYPES[q_norm.dtype], eps, offset,
    )  # fmt: skip
    loaded.bough_rope(ctypes.addressof(call))
    return q_out, k_out
