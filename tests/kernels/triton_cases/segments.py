"""Attention within segments, as encoders have it."""

from functools import partial

import torch

from bough.kernels.segment_attention import reference as segment_reference, triton as segments
from triton_cases.bed import Bed, Cases, close, each_member, same_twice


def segment_cases(bed: Bed) -> Cases:
    dims = (64, 72, 80, 88, 96, 128) if bed.large else (8, 16, 24, 72, 80)
    kinds = {"windows": [64, 64, 48, 32, 64], "short": [1, 5, 17, 64, 3], "mixed": [130, 1, 64, 65]}
    if bed.large:
        kinds = {"windows": [64] * 90 + [32] * 9 + [16], "long": [3000], "mixed": [1564, 1, 700, 64, 129, 6256]}
    *half, full = bed.dtypes
    axes = bed.cover(bed.dtypes, dims, list(kinds))
    if bed.large:  # a float32 form takes a quarter of a minute to compile: one of a head in two pieces, one in one
        axes = bed.cover(half, dims, list(kinds)) + each_member([full], (72, 128), ("mixed", "windows"))
    for dtype, dim, kind in axes:
        yield f"segments {kind} of {dim} {dtype}", partial(_segments, bed, dim, kinds[kind], dtype)


def _segments(bed: Bed, head_dim: int, lengths: list[int], dtype: torch.dtype) -> None:
    heads = 16 if bed.large else 2
    q, k, v = bed.strided(sum(lengths), (heads, heads, heads), head_dim, dtype)
    want = segment_reference.attend_segments(q.float(), k.float(), v.float(), lengths, head_dim**-0.5).to(dtype)
    got = same_twice(lambda: segments.attend_segments(q, k, v, lengths, head_dim**-0.5))
    close(got, want, dtype)
    rotated = q.contiguous()  # as a rotation leaves it
    for tiling in (segments.SHORT, segments.LONG):
        close(segments.attend(rotated, k, v, tuple(lengths), head_dim**-0.5, tiling), want, dtype)
