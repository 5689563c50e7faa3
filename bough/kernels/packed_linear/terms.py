"""Tokens and a weight in codes on Hopper's tensor cores for 8-bit floats (`terms.cu`): codes are not widened, and a token is
split into two e4m3 terms that add up to it, or comes rounded to one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bough.kernels.codes_source import CodeForm
from bough.kernels.cuda_source import (
    SWIZZLED_BYTES,
    CudaKernel,
    cached_cubin,
    can_map,
    current_stream,
    runs_on,
    tensor_map,
)
from bough.kernels.launching import cdiv, num_sms, power_of_two
from bough.kernels.linear.skinny import SCRATCH
from bough.kernels.packed_linear.decode import DeviceCodes
from bough.kernels.packed_linear.hopper import besides_codes, form_of

_SOURCE = Path(__file__).with_suffix(".cu")
_ROWS: Final = 64
"""Weight rows of a warpgroup."""
_SHARED_BYTES: Final = 225 << 10
"""Of a multiprocessor, for all blocks on it."""
_BESIDES: Final = 5120
"""Bytes that a block takes besides its stages, at most."""
MOST_ROUNDED: Final = 96
"""Tokens that come rounded, at most."""


@dataclass(frozen=True, slots=True)
class TermsCut:
    """How a product is cut."""

    groups: int
    """Warpgroups that multiply."""
    block_k: int
    programs_per_sm: int
    splitters: int = 3
    """Warps that split tokens: with the one that feeds the ring a warpgroup, or two. None if tokens come rounded."""
    most_stages: int = 8
    at_once: int = 1
    """Tokens that a warp splits together."""
    cluster: int = 1
    """Blocks that share a tile's columns, if above 1: their sums meet in shared memory."""
    wide: bool = False
    """Boxes of 4-bit codes have 256 columns."""
    fetched: bool = False
    """Scales and zero points of 4-bit codes come through the copy engine."""
    overlapped: bool = False
    """4-bit codes are multiplied while sums of others are scaled."""

    @property
    def block_n(self) -> int:
        return _ROWS * self.groups

    @property
    def terms(self) -> int:
        return 2 if self.splitters else 1

    def stage_bytes(self, block_t: int, form: CodeForm) -> int:
        return self.block_k * (self.block_n * form.box_bytes // 128 + self.terms * block_t)

    def stages(self, block_t: int, form: CodeForm) -> int:
        """As many as there is room for."""
        room = _SHARED_BYTES // self.programs_per_sm - _BESIDES
        return min(self.most_stages, room // (self.stage_bytes(block_t, form) + self.besides_bytes(form)))

    def besides_bytes(self, form: CodeForm) -> int:
        """What scales and zero points take of a stage."""
        return self.block_k // 128 * self.block_n * (3 if form.has_zeros else 2) if self.fetched else 0

    def takes(self, rows: int, depth: int, form: CodeForm) -> bool:
        """Whether a weight has whole tiles, and scales that can be fetched."""
        if rows % self.block_n or depth % self.block_k or depth // self.block_k < self.cluster:
            return False
        return not self.fetched or (form.group > 0 and form.scale_type > 0 and form.scale_rows == 1)


CUTS: Final[dict[str, dict[int, tuple[TermsCut, ...]]]] = {
    "float8": {
        2: (TermsCut(2, 256, 1), TermsCut(1, 256, 2)),
        8: (TermsCut(2, 256, 1, 7), TermsCut(1, 256, 2, 7)),
        24: (TermsCut(2, 256, 1, 7), TermsCut(1, 256, 2, 7)),
    },
    "float8 in blocks": {
        2: (TermsCut(2, 256, 1), TermsCut(1, 256, 2)),
        8: (TermsCut(2, 256, 1, 7), TermsCut(1, 256, 2, 7)),
    },
    "int4": {4: (TermsCut(1, 512, 2), TermsCut(1, 256, 2))},
    "int4 with zeros": {
        4: (TermsCut(1, 512, 2), TermsCut(1, 256, 2)),
        8: (),
        16: (TermsCut(2, 256, 1, 7), TermsCut(1, 256, 2, 7)),
    },
}
"""By form and tokens at most, what is tried in turn, since a weight must have whole tiles. With more tokens, splitting takes
longer than widening codes does. An H200 takes for four of a Llama's weights (the ring of `hopper`): e4m3 67 us with a token
(72), 76 with 16 (79), 89 with 24 (89), and with 32 more than the ring's 91; in blocks 69 (75); INT4 55 (62), with
zero points 83 with 16 (96), and without them more than the ring's 70."""
ROUNDED_CUTS: Final = (TermsCut(2, 128, 1, 0), TermsCut(1, 128, 1, 0))
"""The same for tokens that come rounded: with 48 and 96 tokens 85 and 100 us (the vendor's library: 102), with 128 tokens
128 us."""


def form_name(weight: DeviceCodes) -> str:
    """The key of `CUTS` for a weight."""
    if weight.kind == "float8":
        return "float8 in blocks" if weight.group else "float8"
    return weight.kind if weight.zeros is None else f"{weight.kind} with zeros"


@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    load = partial(_kernel, device, CUTS["float8"][2][0], 8, CodeForm(kind=1))
    return runs_on(device, load, "quantised weights are widened")


def cubin(cut: TermsCut, block_t: int, form: CodeForm) -> bytes:
    """The kernel's machine code. Needs no device."""
    defines = {
        "BLOCK_T": block_t, "BLOCK_K": cut.block_k, "GROUPS": cut.groups, "STAGES": cut.stages(block_t, form),
        "TERMS": cut.terms, "SPLITTERS": cut.splitters, "AT_ONCE": cut.at_once, "CLUSTER": cut.cluster,
        "WIDE": int(cut.wide), "FETCHED": int(cut.fetched), "OVERLAPPED": int(cut.overlapped), **form.defines(),
    }  # fmt: skip
    return cached_cubin(_SOURCE, "sm_90a", defines)


@cache
def _kernel(device: torch.device, cut: TermsCut, block_t: int, form: CodeForm) -> CudaKernel:
    threads = 128 * cut.groups + 32 * cut.splitters + 32
    room = cut.stages(block_t, form) * (cut.stage_bytes(block_t, form) + cut.besides_bytes(form)) + 1024
    return CudaKernel(cubin(cut, block_t, form), "terms", device, threads=threads, shared_bytes=room)


def cut_for(x_TD: Tensor, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor) -> TermsCut | None:
    """How the product of tokens in bf16 is cut; None: the kernel can't serve it."""
    tokens, depth = x_TD.shape
    cuts = next((cuts for most, cuts in CUTS.get(form_name(weight), {}).items() if 0 < tokens <= most), ())
    if not cuts or depth != weight.cols or x_TD.dtype != torch.bfloat16 or not can_map(x_TD):
        return None
    return _fitting(cuts, weight, bias_O, out_TO)


def rounded_cut_for(tokens: int, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor) -> TermsCut | None:
    """The same of tokens in e4m3, which must be contiguous."""
    if not 0 < tokens <= MOST_ROUNDED or weight.kind != "float8" or weight.group != 0:
        return None
    return _fitting(ROUNDED_CUTS, weight, bias_O, out_TO)


def _fitting(cuts: tuple[TermsCut, ...], weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor) -> TermsCut | None:
    if out_TO.dtype != torch.bfloat16 or (bias_O is not None and bias_O.dtype != torch.bfloat16):
        return None
    form = form_of(weight)
    if form is None or not can_map(weight.codes) or not is_ready(weight.codes.device):
        return None
    return next((cut for cut in cuts if cut.takes(weight.num_rows, weight.cols, form)), None)


def block_of(tokens: int) -> int:
    """Tokens of a block, each of two terms, for so many."""
    return cdiv(tokens, 8) * 8 if tokens <= 32 else power_of_two(tokens)


def multiply_terms(
    x_TD: Tensor,
    weight: DeviceCodes,
    bias_O: Tensor | None,
    out_TO: Tensor,
    cut: TermsCut,
    scale_T: Tensor | None = None,
) -> None:
    """x @ weight.T (+ bias) into `out_TO`, whose rows are contiguous; `cut` is `cut_for` it. With `scale_T`, float32, x is
    e4m3, and `cut` is `rounded_cut_for` it."""
    tokens, depth = x_TD.shape
    device, rows = x_TD.device, weight.num_rows
    form = form_of(weight)
    assert form is not None
    block_t = block_of(tokens) if scale_T is None else max(64, cdiv(tokens, 32) * 32)
    k_steps, tiles = depth // cut.block_k, rows // cut.block_n
    total = tiles * k_steps
    if cut.cluster > 1:
        per_chunk, programs = k_steps, tiles * cut.cluster
        partial = counters = None
    else:
        per_chunk = cdiv(total, num_sms(device) * cut.programs_per_sm)
        programs = cdiv(total, per_chunk)
        partial, counters = SCRATCH.get(device, 2 * programs * cut.block_n * block_t, tiles)
    width = form.box_bytes if form.box_bytes < SWIZZLED_BYTES and not cut.wide else None
    codes = tensor_map(weight.codes, cut.block_n, width)
    scales = zeros = codes  # stand in
    if cut.fetched:
        boxes = cut.block_k // 128
        scales = tensor_map(weight.scales, boxes, cut.block_n)
        zeros = scales if weight.zeros is None else tensor_map(weight.zeros, boxes, cut.block_n)
    arguments = (
        tensor_map(x_TD, block_t), codes, scales, zeros, scale_T, bias_O, out_TO, partial, counters,
        tokens, out_TO.stride(0), per_chunk, total, k_steps, besides_codes(weight),
    )  # fmt: skip
    _kernel(device, cut, block_t, form).launch(programs, arguments, current_stream(device))
