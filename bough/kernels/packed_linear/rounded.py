"""Tokens that come rounded to e4m3 and an e4m3 weight, on Hopper (`rounded.cu`): with scales of tokens and of rows, or of
128 columns of either.

Blocks of a cluster share the columns of a tile, so that a weight of few rows is read by most multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.codes_source import CodeForm
from bough.kernels.cuda_source import (
    CudaKernel,
    CudaSourceError,
    cached_cubin,
    can_map,
    current_stream,
    log,
    runs_on,
    tensor_map,
)
from bough.kernels.launching import cdiv
from bough.kernels.packed_linear.decode import DeviceCodes
from bough.kernels.packed_linear.hopper import besides_codes, form_of

_SOURCE = Path(__file__).with_suffix(".cu")
_ROWS: Final = 64
"""Weight rows of a warpgroup."""
_SHARED_BYTES: Final = 225 << 10
"""Of a block, besides what it takes for barriers."""
_BOX: Final = 128
"""Columns of a stage."""
_MOST_STAGES: Final = 8
_SCALE_ROOM: Final = 1024
"""Bytes of a stage for scales of tokens: the next one begins at a multiple of it."""
_SCALED_ROWS: Final = 64
"""Weight rows that have one scale for 128 columns, or a multiple of it."""


@dataclass(frozen=True, slots=True)
class RoundedCut:
    """How a product is cut."""

    groups: int
    """Warpgroups that multiply, and tiles of 64 rows of a block."""
    split: int
    """Blocks that share a tile's columns, 2 or more."""
    pair: int = 1
    """2: two blocks with neighbouring tiles fetch half of the tokens each, for both."""
    grouped: bool = False
    """Whether 128 columns have scales of their own: those of tokens are fetched, too."""

    @property
    def block_n(self) -> int:
        return _ROWS * self.groups

    @property
    def cluster(self) -> int:
        return self.split * self.pair

    def stage_bytes(self, block_t: int) -> int:
        return _BOX * (self.block_n + block_t) + (_SCALE_ROOM if self.grouped else 0)

    def stages(self, block_t: int) -> int:
        """As many as there is room for."""
        return min(_MOST_STAGES, (_SHARED_BYTES - 1024) // self.stage_bytes(block_t))

    def sums_bytes(self, block_t: int) -> int:
        """What blocks send each other takes the place of stages."""
        return self.split * cdiv(block_t // 8, self.split) * 128 * self.groups * 16

    def takes(self, rows: int, depth: int) -> bool:
        """Whether a weight has whole tiles, and columns for every block."""
        return rows % (self.block_n * self.pair) == depth % _BOX == 0 and depth // _BOX >= self.split


class RoundedRule(NamedTuple):
    """What a cut is for: the most tokens and rows of a product, and its least columns."""

    tokens: int
    rows: int
    depth: int
    cut: RoundedCut


RULES: Final = (
    RoundedRule(128, 3072, 0, RoundedCut(2, 4, 2)),
    RoundedRule(208, 3072, 6144, RoundedCut(2, 4, 2)),
    RoundedRule(64, 4096, 0, RoundedCut(2, 3, 2)),
    RoundedRule(112, 4096, 0, RoundedCut(2, 3)),
    RoundedRule(128, 4096, 0, RoundedCut(2, 3, 2)),
    RoundedRule(160, 4096, 6144, RoundedCut(2, 3, 2)),
    RoundedRule(208, 4096, 6144, RoundedCut(1, 2)),
    RoundedRule(64, 6144, 0, RoundedCut(2, 2, 2)),
)
"""The first that a product is within and whose cut takes the weight; without one, the vendor's library is faster. us on an
H200 with rounding and the norm or activation before it, and of the library:

6144 x 4096 with 48, 64 and 100 tokens: 13.8, 14.7, 17.9 (16.8, 16.9, 17.3)
4096 x 4096 with 48, 64, 100, 128 and 160: 11.2, 12.3, 14.3, 16.9, 18.5 (16.5, 16.6, 16.9, 17.0, 17.4)
4096 x 14336 with 48, 64, 100, 128, 160 and 200: 23.2, 24.5, 28.9, 30.0, 33.2, 36.8 (41.8, 42.3, 43.7, 44.1, 46.1, 46.9)
3072 x 8192 with 100 and 200: 17.7, 25.8 (27.1, 28.7)
2048 x 6144 with 100 and 200: 14.4, 22.4 (21.8, 23.1)

28672 x 4096 is the library's from 48 tokens on, 10240 x 8192 with 100 and 200."""

BLOCK_RULES: Final = (
    RoundedRule(128, 2496, 0, RoundedCut(1, 3, grouped=True)),
    RoundedRule(128, 4224, 0, RoundedCut(1, 2, grouped=True)),
    RoundedRule(128, 8448, 0, RoundedCut(2, 2, grouped=True)),
)
"""Of blocks: cuts whose clusters all run at once (39 of three blocks on an H200, 66 of two). Without a rule, codes are
widened. They are for more tokens than are multiplied in two terms. us on an H200 with the norm and rounding before it, with
codes widened, and of bf16 in the library:

2048 x 4096 with 33, 64 and 128 tokens: 7.5, 8.3, 10.9 (15.7, 15.8, not timed; 10.1, 10.4, 11.6)
4096 x 4096 with 64 tokens: 10.3 (17.5; 13.6); 4096 x 14336: 23.4 (37.0; 38.8)
5120 x 2048 with 33, 64 and 128 tokens: 8.7, 9.7, 12.2 (15.6, 15.5, not timed; 9.4, 9.3, 9.7)
6144 x 4096 with 64 and 100 tokens: 13.3, 16.8 (21.9, not timed; 18.0, 18.5)"""


def rules_for(weight: DeviceCodes) -> tuple[RoundedRule, ...]:
    if weight.kind != "float8":
        return ()
    if weight.group == _BOX and weight.scale_rows % _SCALED_ROWS == 0:
        return BLOCK_RULES
    return RULES if weight.group == 0 else ()


def block_of(tokens: int) -> int:
    """Tokens of a block, for a product of `tokens` tokens."""
    return max(48, cdiv(tokens, 16) * 16)


@rehearsed
@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    load = partial(_kernel, device, RULES[0].cut, 64, CodeForm(kind=1))
    return runs_on(device, load, "products of rounded tokens are left to other kernels")


def cubin(cut: RoundedCut, block_t: int, form: CodeForm) -> bytes:
    """The kernel's machine code. Needs no device."""
    defines = {
        "BLOCK_T": block_t, "GROUPS": cut.groups, "STAGES": cut.stages(block_t), "SPLIT": cut.split, "PAIR": cut.pair,
        **form.defines(),
    }  # fmt: skip
    return cached_cubin(_SOURCE, "sm_90a", defines)


@rehearsed
@cache
def _kernel(device: torch.device, cut: RoundedCut, block_t: int, form: CodeForm) -> CudaKernel:
    room = cut.stages(block_t) * cut.stage_bytes(block_t) + 1024
    threads = 128 * cut.groups + 32
    return CudaKernel(cubin(cut, block_t, form), "rounded", device, threads=threads, shared_bytes=room)


@rehearsed
@cache
def most_clusters(device: torch.device, cut: RoundedCut, block_t: int, form: CodeForm) -> int:
    """That run at once; 0 if the kernel can't be had."""
    try:
        return _kernel(device, cut, block_t, form).most_clusters(cut.cluster)
    except CudaSourceError as error:
        log.warning("a product of rounded tokens is left to other kernels: %s", error)
        return 0


def cut_for(tokens: int, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor) -> RoundedCut | None:
    """How the product of tokens in e4m3, which must be contiguous, is cut; None: the kernel can't serve it."""
    rules = rules_for(weight)
    if not rules:
        return None
    if out_TO.dtype != torch.bfloat16 or (bias_O is not None and bias_O.dtype != torch.bfloat16):
        return None
    form = form_of(weight)
    if form is None or not can_map(weight.codes) or not is_ready(weight.codes.device):
        return None
    rows, depth = weight.num_rows, weight.cols
    for most_tokens, most_rows, least_depth, cut in rules:
        if 0 < tokens <= most_tokens and rows <= most_rows and depth >= least_depth and cut.takes(rows, depth):
            tiles = rows // cut.block_n // cut.pair
            most = most_clusters(weight.codes.device, cut, block_of(tokens), form)
            return cut if tiles <= most else None  # a second wave would take as long as the first
    return None


def multiply_rounded(
    x_TD: Tensor, scale_T: Tensor, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor, cut: RoundedCut
) -> None:
    """x @ weight.T (+ bias) into `out_TO`, whose rows are contiguous. x is e4m3, to be multiplied by `scale_T`, float32, or
    where the cut is grouped by [D / 128, `block_of` T]; `cut` is `cut_for` it."""
    tokens, depth = x_TD.shape
    device = x_TD.device
    form = form_of(weight)
    assert form is not None
    block_t = block_of(tokens)
    arguments = (
        tensor_map(x_TD, block_t // cut.pair), tensor_map(weight.codes, cut.block_n), scale_T, bias_O, out_TO,
        tokens, out_TO.stride(0), depth // _BOX, besides_codes(weight),
    )  # fmt: skip
    blocks = weight.num_rows // cut.block_n * cut.split
    _kernel(device, cut, block_t, form).launch(blocks, arguments, current_stream(device))
