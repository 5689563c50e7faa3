# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Tokens in e4m3 with a scale per 128 columns, as checkpoints in blocks of FP8 ask for."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import Launcher, cdiv, power_of_two, trigger, wait

GROUP: Final = 128
"""Columns that share a scale."""
_GROUPS_AT_ONCE: Final = 8
"""That a program rounds."""
_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def _round_kernel(
    x,
    codes,
    scales,
    x_stride,
    codes_stride,
    scale_row,
    scale_group,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    POWERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some groups of a row as e4m3, and what each is to be multiplied by."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (group < GROUPS)[:, None]
    value = tl.load(x + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-12) / _E4M3_MAX
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    rounded = (value / scale[:, None]).to(tl.float8e4nv)
    tl.store(codes + row * codes_stride + col, rounded, mask=inside)
    tl.store(scales + row * scale_row + group * scale_group, scale, mask=group < GROUPS)


_ROUND = Launcher(_round_kernel)


def round_groups(x_ND: Tensor, codes_ND: Tensor, scales_NG: Tensor, *, powers: bool) -> None:
    """Rounds rows whose values are contiguous, and whose width is a multiple of 128, to e4m3. Scales are float32; `powers`:
    rounded up to powers of two. Results may have any stride between rows, and scales between groups."""
    count, width = x_ND.shape
    groups = width // GROUP
    block = min(_GROUPS_AT_ONCE, power_of_two(groups))
    if count:
        _ROUND.launch(
            (count, cdiv(groups, block)),
            (x_ND, codes_ND, scales_NG),
            (x_ND.stride(0), codes_ND.stride(0), scales_NG.stride(0), scales_NG.stride(1)),
            (),
            (groups, block, powers),
            num_warps=4,
        )


def rounded_tokens(x_TD: Tensor, room: int, *, powers: bool) -> tuple[Tensor, Tensor]:
    """(e4m3 [T, D], float32 [D / 128, room]): the scales of `room` >= T tokens lie together, those of no token hold
    anything."""
    codes = torch.empty(x_TD.shape, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scales = torch.empty((x_TD.shape[1] // GROUP, room), dtype=torch.float32, device=x_TD.device)
    round_groups(x_TD, codes, scales.t(), powers=powers)
    return codes, scales
