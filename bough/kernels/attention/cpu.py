"""Attention on the CPU by the compiled kernels: no padding, no copies of keys; shared spans are read once a group."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from bough.kernels.attention.inputs import AttentionInputs, Spec
from bough.kernels.attention.torch_backend import TorchAttention
from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.library import DTYPES

_LANES = 16


class _Step(ctypes.Structure):
    """`struct Step` of the C++ code."""

    _fields_ = [
        ("query_start", ctypes.c_void_p),
        ("kv_len", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("loc", ctypes.c_void_p),
        ("group_rows", ctypes.c_void_p),
        ("group_start", ctypes.c_void_p),
        ("group_tokens", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("groups", ctypes.c_int32),
    ]


class _Layer(ctypes.Structure):
    """`struct Layer` of the C++ code."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_token", ctypes.c_int64),
        ("q_head", ctypes.c_int64),
        ("k_token", ctypes.c_int64),
        ("k_head", ctypes.c_int64),
        ("v_token", ctypes.c_int64),
        ("v_head", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("v_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("cache_dtype", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


def available() -> bool:
    return library() is not None


class CpuAttention:
    """Layers that the kernels don't cover (odd head widths, 8-bit caches) are computed by torch."""

    def __init__(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs
        self._torch: TorchAttention | None = None
        shared = inputs.shared
        self._keep = (
            inputs.query_start_R1.to(torch.int32).contiguous(),
            inputs.kv_len_R.to(torch.int32).contiguous(),
            inputs.slots_R.to(torch.int32).contiguous(),
            inputs.loc_T.to(torch.int64).contiguous(),
        )
        query_start, kv_len, slots, loc = self._keep
        self._step = _Step(
            query_start.data_ptr(), kv_len.data_ptr(), slots.data_ptr(), inputs.page_table.data_ptr(), loc.data_ptr(),
            None if shared is None else shared.rows_S.data_ptr(),
            None if shared is None else shared.start_G1.data_ptr(),
            None if shared is None else shared.num_tokens_G.data_ptr(),
            inputs.page_table.stride(0), kv_len.shape[0], loc.shape[0], inputs.page_size,
            0 if shared is None else shared.num_tokens_G.shape[0],
        )  # fmt: skip
        self._step_address = ctypes.addressof(self._step)

    def forward(self, spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Writes k and v to their pages, then attends: [T, N * V]."""
        inputs = self._inputs
        k_cache, v_cache = inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]
        loaded = library()
        q_token, q_head, q_unit = q_TNH.stride()
        k_token, k_head, k_unit = k_TKH.stride()
        v_token, v_head, v_unit = v_TKH.stride()
        dim, v_dim, dtype = spec.head_dim, v_cache.shape[-1], q_TNH.dtype
        covered = (
            loaded is not None
            and dim % _LANES == 0
            and v_dim % _LANES == 0
            and q_unit == k_unit == v_unit == 1
            and dtype in DTYPES
            and dtype == k_TKH.dtype == v_TKH.dtype
            and k_cache.dtype in DTYPES
            and not inputs.k_scales
        )
        if loaded is None or not covered:
            if self._torch is None:
                self._torch = TorchAttention(inputs)
            return self._torch.forward(spec, q_TNH, k_TKH, v_TKH)
        out = q_TNH.new_empty((q_TNH.shape[0], spec.num_heads * v_dim))
        layer = _Layer(
            q_TNH.data_ptr(), k_TKH.data_ptr(), v_TKH.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
            out.data_ptr(), q_token, q_head, k_token, k_head, v_token, v_head, spec.num_heads, spec.num_kv_heads,
            dim, v_dim, spec.window or 0, spec.causal, DTYPES[dtype], DTYPES[k_cache.dtype], spec.scale,
            spec.softcap or 0.0,
        )  # fmt: skip
        loaded.bough_attention(self._step_address, ctypes.addressof(layer))
        return out
