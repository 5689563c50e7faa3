"""Few tokens and a weight in codes, on Hopper: through the ring of `linear.ring`, which reads codes as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bough.kernels.codes_source import CODE_GROUPS, CODE_KINDS, CodedWeight, CodeForm, scale_type
from bough.kernels.cuda_source import can_map
from bough.kernels.launching import cdiv, num_sms, power_of_two
from bough.kernels.linear.ring import is_ready, launch_codes, shared_bytes
from bough.kernels.linear.skinny import SCRATCH
from bough.kernels.packed_linear.decode import DeviceCodes

_WARP_ROWS: Final = 64
"""Rows of a warpgroup whose warps have one tile each."""
_SHARED_BYTES: Final = 225 << 10
"""Of a multiprocessor, for all blocks on it."""


@dataclass(frozen=True, slots=True)
class RingCut:
    """How a product is cut."""

    groups: int
    """Warpgroups."""
    tiles: int
    """Of 16 rows, that a warp has."""
    block_k: int
    programs_per_sm: int
    most_stages: int = 8

    @property
    def block_n(self) -> int:
        return _WARP_ROWS * self.groups * self.tiles

    def stages(self, block_t: int, form: CodeForm) -> int:
        """As many as there is room for."""
        room = _SHARED_BYTES // self.programs_per_sm - 2048
        one = shared_bytes((block_t, self.block_n, self.block_k), 1, silu_mul=False, normed=0, form=form) - 1024
        return min(self.most_stages, room // one)


_CUTS: Final[dict[str, dict[int, tuple[RingCut, ...]]]] = {
    "float8": {
        8: (RingCut(1, 1, 512, 2), RingCut(1, 1, 256, 2), RingCut(1, 1, 128, 2)),
        16: (RingCut(1, 1, 256, 2), RingCut(1, 1, 128, 2)),
        32: (RingCut(1, 1, 256, 2), RingCut(1, 1, 128, 2)),
        64: (RingCut(1, 1, 256, 2), RingCut(1, 1, 128, 2)),
    },
    "int4": {
        8: (RingCut(1, 2, 512, 2), RingCut(1, 2, 256, 2), RingCut(1, 2, 128, 2), RingCut(1, 1, 128, 2)),
        16: (RingCut(1, 2, 512, 2), RingCut(1, 2, 256, 2), RingCut(1, 2, 128, 2), RingCut(1, 1, 128, 2)),
        32: (RingCut(4, 1, 256, 1), RingCut(1, 1, 256, 3), RingCut(1, 1, 128, 2)),
    },
}
"""By kind and tokens of a block, the fastest of eleven on an H200 and what stands in for it where a weight is no multiple of
its tiles. Four weights of a Llama, 6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336, take 70, 77, 89 and 126 us in
e4m3 (52 at memory's speed), 62, 71 and 93 us in INT4; with more tokens other kernels are faster."""


def cut_for(x_TD: Tensor, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor) -> RingCut | None:
    """How the ring cuts the product; None: it can't serve it."""
    tokens, depth = x_TD.shape
    block_t = power_of_two(tokens, 8)
    cuts = _CUTS.get(weight.kind, {}).get(block_t)
    if cuts is None or depth != weight.cols or not is_ready(x_TD.device):
        return None
    if (
        x_TD.dtype != torch.bfloat16
        or out_TO.dtype != torch.bfloat16
        or (bias_O is not None and bias_O.dtype != x_TD.dtype)
    ):
        return None
    if form_of(weight) is None:
        return None
    if not can_map(x_TD) or not can_map(weight.codes):
        return None
    for cut in cuts:
        if weight.num_rows % cut.block_n == depth % cut.block_k == 0:
            return cut
    return None


def form_of(weight: DeviceCodes, tiles: int = 1) -> CodeForm | None:
    """How the sources for Hopper see it; None: not at all."""
    scales = scale_type(weight.scales)
    if scales is None or weight.group not in CODE_GROUPS.get(weight.kind, ()):
        return None
    if weight.kind == "float4" and weight.scales.dtype != torch.bfloat16:
        return None  # weights are scaled in bf16
    return CodeForm(
        kind=CODE_KINDS[weight.kind],
        tiles=tiles,
        group=weight.group,
        scale_rows=weight.scale_rows,
        scale_type=scales,
        has_zeros=weight.zeros is not None,
    )


def besides_codes(weight: DeviceCodes) -> CodedWeight:
    """As a kernel's argument."""
    return CodedWeight(
        weight.scales.data_ptr(),
        None if weight.row_scales is None else weight.row_scales.data_ptr(),
        None if weight.zeros is None else weight.zeros.data_ptr(),
        weight.scales.shape[1],
        weight.scales.shape[0],
    )


def multiply_codes(x_TD: Tensor, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor, cut: RingCut) -> None:
    """x @ weight.T (+ bias) into `out_TO`, whose rows are contiguous. Needs `form_of`."""
    tokens, depth = x_TD.shape
    device, rows = x_TD.device, weight.num_rows
    form = form_of(weight, cut.tiles)
    assert form is not None
    block_t = power_of_two(tokens, 8)
    k_steps, tiles = depth // cut.block_k, rows // cut.block_n
    total = tiles * k_steps
    per_chunk = cdiv(total, num_sms(device) * cut.programs_per_sm)
    programs = cdiv(total, per_chunk)
    partial, counters = SCRATCH.get(device, 2 * programs * cut.block_n * block_t, tiles)
    launch_codes(
        x_TD, weight.codes, besides_codes(weight), form, bias_O, out_TO, partial, counters,
        cut=(programs, per_chunk, total, k_steps), block=(block_t, cut.block_n, cut.block_k),
        stages=cut.stages(block_t, form),
    )  # fmt: skip
