"""Sampling by the compiled kernels: same filters, same random numbers, no sort of the vocabulary."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES
from bough.kernels.sampling import reference


class _Draw(ctypes.Structure):
    """`struct Draw` of the C++ code."""

    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    ]


def available() -> bool:
    return library() is not None


def argmax(logits_RV: Tensor, ids_V: Tensor | None = None) -> Tensor:
    if ids_V is not None:
        return ids_V[argmax(logits_RV)]
    loaded = library()
    if loaded is None or logits_RV.dtype not in DTYPES or logits_RV.stride(1) != 1:
        return reference.argmax(logits_RV)
    out = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    call = _Draw(
        logits=logits_RV.data_ptr(),
        out=out.data_ptr(),
        rows=logits_RV.shape[0],
        vocab=logits_RV.shape[1],
        step=logits_RV.stride(0),
        dtype=DTYPES[logits_RV.dtype],
    )
    loaded.bough_sample(ctypes.addressof(call))
    return out


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    counters_R: Tensor,
) -> Tensor:
    loaded = library()
    if loaded is None or logits_RV.dtype not in DTYPES or logits_RV.stride(1) != 1:
        return reference.sample(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, counters_R)
    temperature, top_p, min_p = (p.to(torch.float32).contiguous() for p in (temperature_R, top_p_R, min_p_R))
    top_k, seeds, counters = (p.to(torch.int64).contiguous() for p in (top_k_R, seeds_R, counters_R))
    out = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    call = _Draw(
        logits_RV.data_ptr(), temperature.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), top_k.data_ptr(),
        seeds.data_ptr(), counters.data_ptr(), out.data_ptr(), logits_RV.shape[0], logits_RV.shape[1],
        logits_RV.stride(0), DTYPES[logits_RV.dtype],
    )  # fmt: skip
    loaded.bough_sample(ctypes.addressof(call))
    return out
