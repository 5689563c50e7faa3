"""The skinny product written for Hopper (`ring.cu`): it starts to read weights before the kernel before it has ended, may
begin with a norm, and takes weights in codes of 8 or 4 bits."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.codes_source import CodedWeight, CodeForm
from bough.kernels.cuda_source import SWIZZLED_BYTES, CudaKernel, cached_cubin, current_stream, runs_on, tensor_map
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
_NOT_CODED = CodedWeight()
_PLAIN = CodeForm()


@rehearsed
@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    return runs_on(
        device,
        partial(_kernel, device, half=False, block_t=8, block_n=_ROWS, block_k=128, stages=8, silu_mul=False),
        "products of few tokens start later than they could",
    )


@rehearsed
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
        "FP16": int(half), "NORM": normed, **form.defines(),
    }  # fmt: skip
    room = shared_bytes((block_t, block_n, block_k), stages, silu_mul=silu_mul, normed=normed, form=form)
    cubin = cached_cubin(_SOURCE, "sm_90a", defines)
    return CudaKernel(cubin, "ring", device, threads=128 * groups + 32, shared_bytes=room)


def shared_bytes(
    block: tuple[int, int, int], stages: int, *, silu_mul: bool, normed: int, form: CodeForm = _PLAIN
) -> int:
    """What a block of the kernel takes. `normed`: as of `_kernel`."""
    block_t, block_n, block_k = block
    weight = block_n * block_k * (form.box_bytes or 256) // 128
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
    width = form.box_bytes if form.box_bytes < SWIZZLED_BYTES else None
    arguments = (
        tensor_map(x, block_t), tensor_map(codes, block_n, width), bias, out, partial, counters,
        x.shape[0], out.shape[1], out.stride(0), per_chunk, total, k_steps, _NOT_NORMED, coded,
    )  # fmt: skip
    kernel.launch(programs, arguments, current_stream(x.device))
