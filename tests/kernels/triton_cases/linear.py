"""Products of few rows with a matrix."""

from functools import partial

import torch

from bough.kernels.linear import reference as linear_reference, skinny
from triton_cases.bed import Bed, Cases, close, same_twice


def linear_cases(bed: Bed) -> Cases:
    if bed.large:
        shapes = [(1, 4096, 4096), (3, 6144, 4096), (16, 4096, 14336), (33, 28672, 4096), (64, 6144, 4096)]
        shapes += [(128, 4096, 4096), (200, 4096, 4096), (5, 1000, 2000), (17, 1111, 264)]
        configs = [
            skinny.SkinnyTiling(64, 128, 4, 4, 2, tma=True),
            skinny.SkinnyTiling(64, 128, 4, 4, 1),
            skinny.SkinnyTiling(16, 256, 4, 3, 3),
            skinny.SkinnyTiling(128, 64, 8, 3, 0, tma=True),
            skinny.SkinnyTiling(32, 64, 4, 3, 0, split=3),
        ]
    else:
        shapes = [(1, 64, 128), (3, 96, 200), (17, 130, 64)]
        configs = [
            skinny.SkinnyTiling(32, 32, 4, 3, 1),
            skinny.SkinnyTiling(16, 64, 4, 3, 2),
            skinny.SkinnyTiling(64, 32, 4, 3, 0, split=2),
            skinny.SkinnyTiling(16, 32, 4, 3, 0),
        ]
    for dtype, shape, config in bed.cover(bed.dtypes[:2], shapes, configs):
        if not bed.large or _fits(shape[0], config):
            yield f"skinny {shape} {config} {dtype}", partial(_linear, bed, shape, config, dtype)


def _fits(tokens: int, config: skinny.SkinnyTiling) -> bool:
    """Whether the tiles in flight fit into a multiprocessor's shared memory."""
    return 2 * config.num_stages * config.block_k * (config.block_n + max(16, 1 << (tokens - 1).bit_length())) < 220_000


def _linear(bed: Bed, shape: tuple[int, int, int], config: skinny.SkinnyTiling, dtype: torch.dtype) -> None:
    tokens, rows, depth = shape
    x = bed.normal(tokens, 2 * depth, dtype=dtype)[:, :depth]
    weight = bed.normal(rows, depth, dtype=dtype, scale=2.0 * depth**-0.5)
    bias = bed.normal(rows, dtype=dtype)
    exact = weight.float() if bed.large else weight
    upcast = x.float() if bed.large else x
    run = partial(skinny.skinny, x, weight, config)
    close(same_twice(run), linear_reference.linear(upcast, exact).to(dtype), dtype)
    got = same_twice(partial(run, bias=bias))
    close(got, linear_reference.linear(upcast, exact, bias.to(exact.dtype)).to(dtype), dtype)
    if rows % 2 == 0 and tokens <= 64:
        got = same_twice(partial(run, silu_mul=True))
        close(got, linear_reference.linear_silu_mul(upcast, exact).to(dtype), dtype)
