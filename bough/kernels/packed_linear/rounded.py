"""Tokens that come rounded to e4m3 and an e4m3 weight with scales of rows, on Hopper (`rounded.cu`).

Blocks of a cluster share the columns of a tile, so that a weight of few rows is read by most multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

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
"""Columns that a tile's rows and tokens have in shared memory side by side."""
MOST_TOKENS: Final = 256
_MOST_BLOCKS: Final = 8
"""Of a cluster."""


@dataclass(frozen=True, slots=True)
class RoundedCut:
    """How a product is cut."""

    groups: int
    """Warpgroups that multiply, and tiles of 64 rows of a block."""
    split: int
    """Blocks that share a tile's columns."""
    pair: int = 1
    """2: two blocks with neighbouring tiles fetch half of the tokens each, for both."""
    block_k: int = _BOX
    most_stages: int = 8

    @property
    def block_n(self) -> int:
        return _ROWS * self.groups

    @property
    def cluster(self) -> int:
        return self.split * self.pair

    def stage_bytes(self, block_t: int) -> int:
        return self.block_k * (self.block_n + block_t)

    def stages(self, block_t: int) -> int:
        """As many as there is room for."""
        return min(self.most_stages, (_SHARED_BYTES - 1024) // self.stage_bytes(block_t))

    def sums_bytes(self, block_t: int) -> int:
        """What blocks send each other takes the place of stages."""
        return 0 if self.split == 1 else self.split * cdiv(block_t // 8, self.split) * 128 * self.groups * 16

    def estimated_us(self, block_t: int, rows: int, depth: int) -> float:
        """On an H200: the slowest of memory, L2, what a multiprocessor takes in and its tensor cores, and what follows."""
        tiles, share = rows // self.block_n, depth / self.split
        memory = rows * depth / 4.2e6
        from_l2 = (rows * depth + tiles / self.pair * block_t * depth) / 5.5e6
        taken_in = (self.block_n + block_t) * share / 1.12e5
        multiplied = self.block_n * block_t * share / 4096 / 1755
        sent = 0.0 if self.split == 1 else 0.8 + block_t * self.block_n * 4 * (1 - 1 / self.split) / 5.6e4
        return max(memory, from_l2, taken_in, multiplied) + sent + 2.0


def block_of(tokens: int) -> int:
    """Tokens of a block, for so many."""
    return max(32, cdiv(tokens, 16) * 16)


@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    load = partial(_kernel, device, RoundedCut(2, 2), 64, CodeForm(kind=1))
    return runs_on(device, load, "products of rounded tokens are left to other kernels")


def cubin(cut: RoundedCut, block_t: int, form: CodeForm) -> bytes:
    """The kernel's machine code. Needs no device."""
    defines = {
        "BLOCK_T": block_t, "BLOCK_K": cut.block_k, "GROUPS": cut.groups, "STAGES": cut.stages(block_t),
        "SPLIT": cut.split, "PAIR": cut.pair, **form.defines(),
    }  # fmt: skip
    return cached_cubin(_SOURCE, "sm_90a", defines)


@cache
def _kernel(device: torch.device, cut: RoundedCut, block_t: int, form: CodeForm) -> CudaKernel:
    room = cut.stages(block_t) * cut.stage_bytes(block_t) + 1024
    threads = 128 * cut.groups + 32
    return CudaKernel(cubin(cut, block_t, form), "rounded", device, threads=threads, shared_bytes=room)


@cache
def most_clusters(device: torch.device, cut: RoundedCut, block_t: int, form: CodeForm) -> int:
    """That run at once; 0 if the kernel can't be had."""
    try:
        kernel = _kernel(device, cut, block_t, form)
        if cut.cluster > 1:
            return kernel.most_clusters(cut.cluster)
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    except CudaSourceError as error:
        log.warning("a product of rounded tokens is left to other kernels: %s", error)
        return 0


def cuts_of(tokens: int, rows: int, depth: int) -> Iterator[RoundedCut]:
    """What could serve, if the device has room for as many clusters as there are tiles."""
    block_t = block_of(tokens)
    for groups in (1, 2, 3, 4):
        for split in range(1, _MOST_BLOCKS + 1):
            for pair in (1, 2):
                cut = RoundedCut(groups, split, pair)
                if rows % (cut.block_n * pair) or depth % cut.block_k or depth // cut.block_k < split:
                    continue
                if cut.cluster > _MOST_BLOCKS or groups * block_t > 4 * 128:  # registers
                    continue
                stages = cut.stages(block_t)
                if stages < 3 or cut.sums_bytes(block_t) > stages * cut.stage_bytes(block_t):
                    continue
                yield cut


@cache
def _fastest(tokens: int, rows: int, depth: int, form: CodeForm, device: torch.device) -> RoundedCut | None:
    block_t = block_of(tokens)
    guesses = sorted(cuts_of(tokens, rows, depth), key=lambda cut: cut.estimated_us(block_t, rows, depth))
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    for cut in guesses:
        tiles = rows // cut.block_n
        if tiles * cut.split <= sms and tiles // cut.pair <= most_clusters(device, cut, block_t, form):
            return cut
    return None


def cut_for(tokens: int, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor) -> RoundedCut | None:
    """How the product of tokens in e4m3, which must be contiguous, is cut; None: the kernel can't serve it."""
    if not 0 < tokens <= MOST_TOKENS or weight.kind != "float8" or weight.group != 0:
        return None
    if out_TO.dtype != torch.bfloat16 or (bias_O is not None and bias_O.dtype != torch.bfloat16):
        return None
    form = form_of(weight)
    if form is None or not can_map(weight.codes) or not is_ready(weight.codes.device):
        return None
    return _fastest(tokens, weight.num_rows, weight.cols, form, weight.codes.device)


def multiply_rounded(
    x_TD: Tensor, scale_T: Tensor, weight: DeviceCodes, bias_O: Tensor | None, out_TO: Tensor, cut: RoundedCut
) -> None:
    """x @ weight.T (+ bias) into `out_TO`, whose rows are contiguous. x is e4m3, to be multiplied by `scale_T`, float32;
    `cut` is `cut_for` it."""
    tokens, depth = x_TD.shape
    device = x_TD.device
    form = form_of(weight)
    assert form is not None
    block_t = block_of(tokens)
    arguments = (
        tensor_map(x_TD, block_t // cut.pair), tensor_map(weight.codes, cut.block_n), scale_T, bias_O, out_TO,
        tokens, out_TO.stride(0), depth // cut.block_k, besides_codes(weight),
    )  # fmt: skip
    blocks = weight.num_rows // cut.block_n * cut.split
    _kernel(device, cut, block_t, form).launch(blocks, arguments, current_stream(device))
