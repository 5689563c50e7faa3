"""Tokens and a weight in codes on Hopper's tensor cores for 8-bit floats (`terms.cu`): codes are not widened, and a token is
split into two e4m3 terms that add up to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
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
from bough.kernels.launching import cdiv, num_sms
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
_MOST_STAGES: Final = 8
_ANY: Final = 1 << 62
_FEW_VALUES: Final = 32 << 20
"""Of a weight that is read so fast that the ends of a launch show: 4096 x 4096 and 6144 x 4096, not 4096 x 14336."""


@dataclass(frozen=True, slots=True)
class TermsCut:
    """How a product is cut."""

    groups: int
    """Warpgroups that multiply."""
    block_k: int
    programs_per_sm: int
    splitters: int = 3
    """Warps that split tokens: with the one that feeds the ring, one to four warpgroups."""
    at_once: int = 4
    """Tokens that a warp splits together."""
    cluster: int = 1
    """Blocks that share a tile's columns, if above 1: their sums meet in shared memory."""
    fetched: bool = False
    """Scales and zero points of 4-bit codes come through the copy engine, and boxes of codes have 256 columns."""

    @property
    def block_n(self) -> int:
        return _ROWS * self.groups

    def stage_bytes(self, block_t: int, form: CodeForm) -> int:
        return self.block_k * (self.block_n * form.box_bytes // 128 + 2 * block_t)

    def stages(self, block_t: int, form: CodeForm) -> int:
        """As many as there is room for."""
        room = _SHARED_BYTES // self.programs_per_sm - _BESIDES
        return min(_MOST_STAGES, room // (self.stage_bytes(block_t, form) + self.besides_bytes(form)))

    def besides_bytes(self, form: CodeForm) -> int:
        """What scales and zero points take of a stage."""
        return self.block_k // 128 * self.block_n * (3 if form.has_zeros else 2) if self.fetched else 0

    def takes(self, rows: int, depth: int, form: CodeForm) -> bool:
        """Whether a weight has whole tiles, and scales that can be fetched."""
        if rows % self.block_n or depth % self.block_k or depth // self.block_k < self.cluster:
            return False
        return not self.fetched or (form.group > 0 and form.scale_type > 0 and form.scale_rows == 1)


class TermsRule(NamedTuple):
    """What a cut is for: products of at most these sizes."""

    tokens: int
    rows: int
    values: int
    """Of the weight."""
    cut: TermsCut


_FLOAT8: Final = (
    TermsRule(8, 3072, _ANY, TermsCut(1, 256, 2, 7, cluster=4)),
    TermsRule(8, 6144, _ANY, TermsCut(1, 256, 2, 7, cluster=2)),
    TermsRule(8, _ANY, _ANY, TermsCut(2, 256, 1, 7)),
    TermsRule(8, _ANY, _ANY, TermsCut(1, 256, 2, 7)),
    TermsRule(32, 3072, _FEW_VALUES, TermsCut(4, 256, 1, 7, cluster=8)),
    TermsRule(32, 6144, _FEW_VALUES, TermsCut(4, 256, 1, 7, cluster=4)),
    TermsRule(24, _ANY, _ANY, TermsCut(2, 256, 1, 15)),
    TermsRule(24, _ANY, _ANY, TermsCut(1, 256, 2, 7)),
    TermsRule(32, _ANY, _ANY, TermsCut(2, 256, 1, 11)),
)
RULES: Final[dict[str, tuple[TermsRule, ...]]] = {
    "float8": _FLOAT8,
    "float8 in blocks": _FLOAT8,
    "int4": (
        TermsRule(16, 3072, _FEW_VALUES, TermsCut(2, 256, 1, 7, cluster=4, fetched=True)),
        TermsRule(8, 6144, _FEW_VALUES, TermsCut(4, 256, 1, 7, cluster=4, fetched=True)),
        TermsRule(16, 6144, _FEW_VALUES, TermsCut(4, 256, 1, 11, at_once=2, cluster=4, fetched=True)),
        TermsRule(1, _ANY, _ANY, TermsCut(1, 512, 2, 3, fetched=True)),
        TermsRule(8, _ANY, _ANY, TermsCut(4, 256, 1, 7, fetched=True)),
        TermsRule(16, _ANY, _ANY, TermsCut(4, 512, 1, 11, at_once=3, fetched=True)),
        TermsRule(16, _ANY, _ANY, TermsCut(2, 512, 1, 7, fetched=True)),
        TermsRule(32, _ANY, _FEW_VALUES, TermsCut(2, 256, 1, 7, fetched=True)),
        TermsRule(32, _ANY, _ANY, TermsCut(4, 256, 1, 7, fetched=True)),
        TermsRule(4, _ANY, _ANY, TermsCut(1, 512, 2, 3)),
        TermsRule(4, _ANY, _ANY, TermsCut(1, 256, 2, 3)),
        TermsRule(16, _ANY, _ANY, TermsCut(4, 512, 1, 7)),
        TermsRule(32, _ANY, _ANY, TermsCut(4, 256, 1, 7)),
    ),
    "int4 with zeros": (
        TermsRule(8, _ANY, _ANY, TermsCut(4, 512, 1, 7, fetched=True)),
        TermsRule(8, _ANY, _ANY, TermsCut(4, 256, 1, 7, fetched=True)),
        TermsRule(16, _ANY, _ANY, TermsCut(2, 512, 1, 7, fetched=True)),
        TermsRule(16, _ANY, _ANY, TermsCut(2, 256, 1, 7, fetched=True)),
        TermsRule(4, _ANY, _ANY, TermsCut(1, 512, 2, 3, at_once=1)),
        TermsRule(4, _ANY, _ANY, TermsCut(1, 256, 2, 3, at_once=1)),
        TermsRule(16, _ANY, _ANY, TermsCut(2, 256, 1, 7, at_once=1)),
        TermsRule(16, _ANY, _ANY, TermsCut(1, 256, 2, 7, at_once=1)),
    ),
}
"""By form, the first rule that a product is within and whose cut takes the weight; without one, the ring of `hopper` is
faster. Clusters are for weights of few rows, whose tiles are too few for all multiprocessors; all of them run at once. Zero
points with scales in float32, which can't be fetched, were measured earlier, splitting a token at a time. e4m3 in blocks has
the cuts of e4m3 with scales of rows; beyond 32 tokens two terms of each are slower than the ring. us on an H200 with the
norm or activation before the product, of 6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336, and of what served them
before:

e4m3, 4 tokens: 10.1, 9.0, 34.1, 18.7 (13.3, 10.0, 34.4, 19.9)
e4m3, 24 tokens: 12.8, 10.4, 38.0, 23.0 (16.2, 13.3, 42.3, 26.5)
e4m3, 32 tokens: 13.7, 12.1, 40.4, 25.4 (15.7, 13.4, 45.2, 25.8)
INT4, 1 token: 8.8, 6.9, 22.0, 13.7 (10.2, 7.7, 26.1, 15.5)
INT4, 16 tokens: 11.2, 9.5, 28.9, 19.8 (13.5, 11.7, 33.4, 21.2) with 7 warps that split; 11 that
have all their tokens at once take 0.5, 0.4, 0.7 and 0.5 less
INT4, 32 tokens: 17.6, 13.4, 41.7, 28.1 (18.3, 15.2, 43.2, 28.3)
e4m3 in blocks, 1, 4, 16 and 24 tokens, 5120 x 2048: 6.1, 6.5, 7.5, 8.5 (8.0, 8.1, 9.8, 11.5); 2048 x 4096: 6.6, 6.7,
8.2, 9.6 (7.5, 7.7, 8.8, 10.8)
"""


def form_name(weight: DeviceCodes) -> str:
    """The key of `RULES` for a weight."""
    if weight.kind == "float8":
        return "float8 in blocks" if weight.group else "float8"
    return weight.kind if weight.zeros is None else f"{weight.kind} with zeros"


def cuts_of(tokens: int, weight: DeviceCodes, form: CodeForm) -> Iterator[TermsCut]:
    """What serves this number of tokens, the first one first."""
    rows, depth = weight.num_rows, weight.cols
    for rule in RULES.get(form_name(weight), ()):
        within = 0 < tokens <= rule.tokens and rows <= rule.rows and rows * depth <= rule.values
        if within and rule.cut.takes(rows, depth, form):
            yield rule.cut


@rehearsed
@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    load = partial(_kernel, device, RULES["float8"][0].cut, 8, CodeForm(kind=1))
    return runs_on(device, load, "quantised weights are widened")


def cubin(cut: TermsCut, block_t: int, form: CodeForm) -> bytes:
    """The kernel's machine code. Needs no device."""
    defines = {
        "BLOCK_T": block_t, "BLOCK_K": cut.block_k, "GROUPS": cut.groups, "STAGES": cut.stages(block_t, form),
        "SPLITTERS": cut.splitters, "AT_ONCE": cut.at_once, "CLUSTER": cut.cluster, "FETCHED": int(cut.fetched),
        **form.defines(),
    }  # fmt: skip
    return cached_cubin(_SOURCE, "sm_90a", defines)


@rehearsed
@cache
def _kernel(device: torch.device, cut: TermsCut, block_t: int, form: CodeForm) -> CudaKernel:
    threads = 128 * cut.groups + 32 * cut.splitters + 32
    room = cut.stages(block_t, form) * (cut.stage_bytes(block_t, form) + cut.besides_bytes(form)) + 1024
    return CudaKernel(cubin(cut, block_t, form), "terms", device, threads=threads, shared_bytes=room)


def cut_for(x_TD: Tensor, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor) -> TermsCut | None:
    """How the product of tokens in bf16 is cut; None: the kernel can't serve it."""
    tokens, depth = x_TD.shape
    if depth != weight.cols or x_TD.dtype != torch.bfloat16 or not can_map(x_TD):
        return None
    if out_TO.dtype != torch.bfloat16 or (bias_O is not None and bias_O.dtype != torch.bfloat16):
        return None
    form = form_of(weight)
    if form is None or not can_map(weight.codes) or not is_ready(weight.codes.device):
        return None
    return next(cuts_of(tokens, weight, form), None)


def block_of(tokens: int) -> int:
    """Tokens of a block, each of two terms, for a product of `tokens` tokens."""
    return cdiv(tokens, 8) * 8


def multiply_terms(x_TD: Tensor, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor, cut: TermsCut) -> None:
    """x @ weight.T (+ bias) into `out_TO`, whose rows are contiguous; `cut` is `cut_for` it."""
    tokens, depth = x_TD.shape
    device, rows = x_TD.device, weight.num_rows
    form = form_of(weight)
    assert form is not None
    block_t = block_of(tokens)
    k_steps, tiles = depth // cut.block_k, rows // cut.block_n
    total = tiles * k_steps
    if cut.cluster > 1:
        per_chunk, programs = k_steps, tiles * cut.cluster
        partial = counters = None
    else:
        per_chunk = cdiv(total, num_sms(device) * cut.programs_per_sm)
        programs = cdiv(total, per_chunk)
        partial, counters = SCRATCH.get(device, 2 * programs * cut.block_n * block_t, tiles)
    width = form.box_bytes if form.box_bytes < SWIZZLED_BYTES and not cut.fetched else None
    codes = tensor_map(weight.codes, cut.block_n, width)
    scales = zeros = codes  # stand in
    if cut.fetched:
        boxes = cut.block_k // 128
        scales = tensor_map(weight.scales, boxes, cut.block_n)
        zeros = scales if weight.zeros is None else tensor_map(weight.zeros, boxes, cut.block_n)
    arguments = (
        tensor_map(x_TD, block_t), codes, scales, zeros, bias_O, out_TO, partial, counters, tokens,
        out_TO.stride(0), per_chunk, total, k_steps, besides_codes(weight),
    )  # fmt: skip
    _kernel(device, cut, block_t, form).launch(programs, arguments, current_stream(device))
