"""The skinny product written for Hopper (`ring.cu`): it starts to read weights before the kernel before it has ended, may
begin with a norm, and takes weights in codes of 8 or 4 bits."""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bough.kernels.cuda_source import CudaKernel, cached_cubin, current_stream, runs_on, tensor_map
from bough.kernels.norm.inlined import NormedStruct

_SOURCE = Path(__file__).with_suffix(".cu")
_ROWS = 64
"""Weight rows of a warpgroup."""
MOST_TOKENS = 64
"""The widest token block that the source knows."""
MOST_NORMED = 2
"""Tokens of a product that begins with a norm, which every block makes for itself. On an H200, a norm, 5120 x 2048 and
2048 x 4096 take 15.2 us instead of 16.0 with one token, 15.7 with two either way, 16.6 instead of 16.0 with three."""
MOST_SHARED_BYTES = 225 << 10
"""Of a block, less what the source takes besides."""
_NOT_NORMED = NormedStruct()
BOX_COLUMNS: Final = 128
"""Columns of a weight in codes that come together, and that share a scale if not all do."""
_SCALE_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CodeForm(NamedTuple):
    """What a weight's values are, and how a warp takes them. By default: as those of x."""

    kind: int = 0
    """1: e4m3; 2: integers of 4 bits, as `packed_linear.decode` lays them out."""
    tiles: int = 1
    """Of 16 rows, that a warp has."""
    grouped: bool = False
    """Whether `BOX_COLUMNS` share a scale; otherwise all columns do."""
    scale_rows: int = 1
    scale_type: int = 0
    has_zeros: bool = False


class CodedWeight(ctypes.Structure):
    """What a weight in codes has besides them, as the source reads it."""

    _fields_ = (
        ("scales", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("width", ctypes.c_int),
    )


_NOT_CODED = CodedWeight()
_PLAIN = CodeForm()


def scale_type(scales: Tensor) -> int | None:
    """How the source names the type of scales; None: it does not know it."""
    return _SCALE_TYPES.get(scales.dtype)


@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    return runs_on(
        device,
        partial(_kernel, device, half=False, block_t=8, block_n=_ROWS, block_k=128, stages=8, silu_mul=False),
        "products of few tokens start later than they could",
    )


@cache
def _kernel(
    device: torch.device,
    half: bool,
    block_t: int,
    block_n: int,
    block_k: int,
    stages: int,
    silu_mul: bool,
    normed: int = 0,
    form: CodeForm = _PLAIN,
) -> CudaKernel:
    """`normed`: the depth of the product, where it begins with a norm."""
    groups = block_n // (_ROWS * form.tiles)
    defines = {
        "BLOCK_T": block_t, "BLOCK_K": block_k, "GROUPS": groups, "STAGES": stages, "SILU": int(silu_mul),
        "FP16": int(half), "NORM": normed, "KIND": form.kind, "TILES": form.tiles, "GROUP": int(form.grouped),
        "SCALE_ROWS": form.scale_rows, "SCALES": form.scale_type, "ZEROS": int(form.has_zeros),
    }  # fmt: skip
    room = shared_bytes((block_t, block_n, block_k), stages, silu_mul=silu_mul, normed=normed, kind=form.kind)
    cubin = cached_cubin(_SOURCE, "sm_90a", defines)
    return CudaKernel(cubin, "ring", device, threads=128 * groups + 32, shared_bytes=room)


def shared_bytes(block: tuple[int, int, int], stages: int, *, silu_mul: bool, normed: int, kind: int = 0) -> int:
    """What a block of the kernel takes. `normed`: as of `_kernel`. `kind`: of a `CodeForm`."""
    block_t, block_n, block_k = block
    weight = block_n * block_k * (4, 2, 1)[kind] // 2
    stage = weight * (2 if silu_mul else 1) + (0 if normed else 2 * block_k * block_t)
    return stages * stage + 2 * normed * block_t + 1024


def launch_ring(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    partial: Tensor,
    counters: Tensor,
    *,
    cut: tuple[int, int, int, int],
    block: tuple[int, int, int],
    stages: int,
    silu_mul: bool,
    normed: NormedStruct | None = None,
) -> None:
    """`cut`: programs, steps a program, steps in all, steps a tile. `block`: tokens, weight rows, columns of a tile.

    Weight rows and depth must be whole tiles, rows 16-byte aligned. `normed`, of `x` in bf16 and a `block` of 8 tokens: the
    product is of the norm.
    """
    programs, per_chunk, total, k_steps = cut
    block_t, block_n, block_k = block
    depth = 0 if normed is None else x.shape[1]
    kernel = _kernel(x.device, x.dtype == torch.float16, block_t, block_n, block_k, stages, silu_mul, depth)
    arguments = (
        tensor_map(x, block_t), tensor_map(weight, block_n), bias, out, partial, counters,
        x.shape[0], out.shape[1], out.stride(0), per_chunk, total, k_steps, _NOT_NORMED if normed is None else normed,
        _NOT_CODED,
    )  # fmt: skip
    kernel.launch(programs, arguments, current_stream(x.device))


def launch_codes(
    x: Tensor,
    codes: Tensor,
    coded: CodedWeight,
    form: CodeForm,
    bias: Tensor | None,
    out: Tensor,
    partial: Tensor,
    counters: Tensor,
    *,
    cut: tuple[int, int, int, int],
    block: tuple[int, int, int],
    stages: int,
) -> None:
    """As `launch_ring`, of `x` in bf16 and a weight in codes, uint8 [O, D] or [O, D / 2]. `coded` stays alive until the call
    returns; what it points to must for as long as the kernel runs."""
    programs, per_chunk, total, k_steps = cut
    block_t, block_n, block_k = block
    kernel = _kernel(x.device, False, block_t, block_n, block_k, stages, False, 0, form)
    width = BOX_COLUMNS // 2 if form.kind == 2 else None
    arguments = (
        tensor_map(x, block_t), tensor_map(codes, block_n, width), bias, out, partial, counters,
        x.shape[0], out.shape[1], out.stride(0), per_chunk, total, k_steps, _NOT_NORMED, coded,
    )  # fmt: skip
    kernel.launch(programs, arguments, current_stream(x.device))
