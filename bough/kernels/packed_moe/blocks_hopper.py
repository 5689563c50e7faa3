"""Experts in blocks of e4m3 for many tokens of each, on Hopper: two launches of `blocks_hopper.cu`, a product each, on the
tensor cores' 8-bit floats. Tokens are rounded to e4m3 with a scale per 128 columns, as checkpoints in blocks ask for.

A rounded row and its scales lie side by side, so that they are laid out by expert in one copy.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.cuda_source import CudaKernel, cached_cubin, can_map, current_stream, runs_on, tensor_map
from bough.kernels.launching import cdiv
from bough.kernels.moe.grouping import Grouping, group_tokens, sum_parts
from bough.kernels.packed_linear import groups
from bough.kernels.packed_linear.codes import Inputs
from bough.kernels.packed_linear.decode import DeviceCodes

_SOURCE = Path(__file__).with_suffix(".cu")
_GROUP: Final = groups.GROUP
"""Columns that share a scale, and that a step takes."""
_FEATURES: Final = 64
"""Weight rows of each half of a tile."""
HEIGHT: Final = 128
"""Rows of a tile."""
_STAGES: Final = 5
_LEAST_PAIRS: Final = 60
"""Pairs of an expert, on average, from which on it is faster than products that widen codes. us of a layer of 128 experts of
2048 x 768 on an H200 with 1,000, 2,000, 4,000 and 16,000 tokens, 8 experts each: 302, 394, 627, 2262; with codes that are
widened 337, 563, 1010, 3569; in bf16 374, 474, 704, 2168."""


class _BlockScales(ctypes.Structure):
    """As in `blocks_hopper.cu`."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("pitch", ctypes.c_int),
        ("width", ctypes.c_int),
        ("weight_rows", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows of e4m3 with a scale per 128 columns."""

    memory: Tensor
    """uint8 [N, pitch]: a row's codes, then its scales."""
    width: int

    @property
    def codes(self) -> Tensor:
        return self.memory.view(torch.float8_e4m3fn)[:, : self.width]

    @property
    def scales(self) -> Tensor:
        """float32 [N, width / 128], with the rows' stride."""
        return self.memory.view(torch.float32)[:, self.width // 4 :][:, : self.width // _GROUP]


def round_groups(x_ND: Tensor, *, power_of_two_scales: bool = False) -> RoundedRows:
    """Rows, whose values are contiguous and whose width is a multiple of 128, in e4m3."""
    count, width = x_ND.shape
    pitch = cdiv(width + 4 * (width // _GROUP), 16) * 16
    rows = RoundedRows(torch.empty((count, pitch), dtype=torch.uint8, device=x_ND.device), width)
    groups.round_groups(x_ND, rows.codes, rows.scales, powers=power_of_two_scales)
    return rows


def _defines(steps: int, *, gated: bool) -> dict[str, int]:
    # With fewer steps than stages, one warpgroup of a block could be a tile ahead of the other.
    return {"STAGES": _STAGES, "LAG": int(steps >= _STAGES), "GATED": int(gated)}


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: CudaKernel
    pairs: int
    """That run at once."""


@rehearsed
@cache
def _loaded(device: torch.device, steps: int, gated: bool) -> _Loaded:
    stage = (HEIGHT + 2 * _FEATURES) * _GROUP
    stored = 2 * 64 * 128 * 2  # of each of two warpgroups 64 rows
    kernel = CudaKernel(
        cached_cubin(_SOURCE, "sm_90a", _defines(steps, gated=gated)),
        "blocks_hopper",
        device,
        threads=384,
        shared_bytes=_STAGES * (stage + 2 * 8) + stored + 1024,
    )
    return _Loaded(kernel, kernel.most_clusters(2))


@rehearsed
@cache
def is_ready(device: torch.device, width: int, inner: int) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""

    def load() -> None:
        both = ((width // _GROUP, True), (inner // _GROUP, False))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda each: cached_cubin(_SOURCE, "sm_90a", _defines(each[0], gated=each[1])), both))
        for steps, gated in both:
            _loaded(device, steps, gated)

    return runs_on(
        device, load, "experts of many tokens in blocks of FP8 are multiplied more slowly than they could be"
    )


def takes(gate_up: object, down: object, num_experts: int, width: int, inputs: Inputs | None) -> bool:
    """Whether the kernel takes these weights, and may round their tokens."""
    if not isinstance(gate_up, DeviceCodes) or not isinstance(down, DeviceCodes):
        return False
    if inputs is None or inputs.kind != "float8" or inputs.group != _GROUP or inputs.scale is not None:
        return False
    inner = gate_up.num_rows // num_experts // 2
    for weight, depth in ((gate_up, width), (down, inner)):
        if weight.kind != "float8" or weight.group != _GROUP or weight.row_scales is not None:
            return False
        if weight.scale_rows % _FEATURES or depth % _GROUP or weight.cols != depth or not can_map(weight.codes):
            return False
    return width % _FEATURES == inner % _FEATURES == 0


def suits(
    x_TD: Tensor,
    gate_up: object,
    down: object,
    num_experts: int,
    num_pairs: int,
    activation: str,
    inputs: Inputs | None,
) -> bool:
    """Whether `experts` serves these, and is the fastest that does."""
    if num_pairs < _LEAST_PAIRS * num_experts or activation != "silu" or x_TD.dtype != torch.bfloat16:
        return False
    if not takes(gate_up, down, num_experts, x_TD.shape[1], inputs):
        return False
    assert isinstance(gate_up, DeviceCodes)
    return is_ready(x_TD.device, x_TD.shape[1], gate_up.num_rows // num_experts // 2)


def experts(
    x_TD: Tensor,
    gate_up: DeviceCodes,
    down: DeviceCodes,
    num_experts: int,
    inputs: Inputs,
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    out_TD: Tensor,
) -> None:
    """As `packed_experts` with silu, into out_TD. Needs `takes`."""
    width, inner = x_TD.shape[1], gate_up.num_rows // num_experts // 2
    powers = inputs.power_of_two
    by_token = round_groups(x_TD, power_of_two_scales=powers)
    grouping, copied, _ = group_tokens(by_token.memory.view(torch.bfloat16), ids_Tk, num_experts, HEIGHT)
    rows = RoundedRows(copied.view(torch.uint8), width)
    hidden = torch.empty((grouping.num_rows, inner), dtype=torch.bfloat16, device=x_TD.device)
    product(rows, gate_up, hidden, grouping, num_experts, gated=True)
    del rows, copied  # the next ones take their memory
    rows = round_groups(hidden, power_of_two_scales=powers)
    del hidden
    parts = torch.empty((grouping.num_rows, width), dtype=torch.bfloat16, device=x_TD.device)
    product(rows, down, parts, grouping, num_experts, gated=False)
    sum_parts(parts, weights_Tk, grouping, out_TD)


def product(
    rows: RoundedRows, weight: DeviceCodes, out: Tensor, grouping: Grouping, num_experts: int, *, gated: bool
) -> None:
    """Fills the rows of `out` that belong to pairs with rows @ weight[expert].T; `gated`: activated, half as wide."""
    codes, scales, columns = rows.codes, weight.scales.float(), out.shape[1]
    steps = rows.width // _GROUP
    loaded = _loaded(codes.device, steps, gated)
    of_tile = _FEATURES if gated else 2 * _FEATURES
    maps = (tensor_map(codes, HEIGHT // 2), tensor_map(weight.codes, _FEATURES), tensor_map(out, 64))
    beside = _BlockScales(
        rows.scales.data_ptr(), scales.data_ptr(), rows.memory.shape[1] // 4, scales.shape[1], weight.scale_rows
    )
    sizes = (
        cdiv(columns, 2 * of_tile), steps, weight.num_rows // num_experts, columns if gated else _FEATURES, columns,
    )  # fmt: skip
    given = (*maps, grouping.tiles, grouping.num_tiles, beside, *sizes)
    loaded.kernel.launch(2 * loaded.pairs, given, current_stream(codes.device))
