"""Experts in codes for few tokens of each, on Hopper: two launches of `hopper.cu`, a product each, with biases and gates."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.kernels.ahead import rehearsed
from bough.kernels.codes_source import BOX_COLUMNS, CodeForm
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
from bough.kernels.moe.triton import Sorted
from bough.kernels.packed_linear.decode import DeviceCodes
from bough.kernels.packed_linear.hopper import besides_codes, form_of

_SOURCE = Path(__file__).with_suffix(".cu")
_TILE_ROWS: Final = 16
"""Weight rows of a warp."""
_SHARED_BYTES: Final = 225 << 10
"""Of a multiprocessor, which has one block."""
_MOST_STAGES: Final = 12
_LEAST_STAGES: Final = 3
GATES: Final = {"silu": 1, "clamped": 2}
_MOST_PER_EXPERT: Final = 12
"""Pairs of an expert in e4m3, on average: beyond, blocks of 16 tokens read weights too often. On an H200, layers of
Qwen3-30B-A3B take 23, 55, 84, 194 and 222 us for 1, 4, 8, 64 and 100 tokens, 48, 74, 117, 265 and 268 in Triton."""
_MOST_PER_EXPERT_OF_4_BITS: Final = 16


class ExpertsWork(ctypes.Structure):
    """As in `experts.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "batch_expert", "pairs", "bias", "out")),
        ("x_stride", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in ("num_pairs", "per_token", "rows", "depth", "boxes", "num_batches", "experts")
        ),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    )


class WarpShape(NamedTuple):
    """How a block is laid out."""

    row_tiles: int
    """Of 16 weight rows, of an item of work."""
    slices: int
    """Of 128 columns, of a stage. Each has a warp for each row tile."""


_ANY: Final = (WarpShape(2, 8), WarpShape(2, 6), WarpShape(1, 12), WarpShape(1, 8), WarpShape(1, 6), WarpShape(1, 4))
_ANY_8_BITS: Final = (WarpShape(2, 6), WarpShape(1, 8), WarpShape(1, 6), WarpShape(1, 4))
SHAPES: Final = {
    2: (WarpShape(6, 2), WarpShape(4, 4), WarpShape(3, 8), *_ANY),
    1: (WarpShape(6, 4), WarpShape(4, 4), WarpShape(3, 8), *_ANY),
}
"""Those of codes of 4 bits, by halves, the best first. Tall items are fewer: between two, warps meet and sums are added.

Microseconds on an H200, MXFP4, 32 experts of 2880 x 2880, 4 a token, weights of four layers by turns. Two halves, 1 and 4
tokens: 6 x 2 18.0 and 54.5, 6 x 4 18.2 and 56.7 (with two stages), 3 x 8 19.6 and 59.8, 4 x 4 21.7 and 55.8, 2 x 8 21.0 and
61.3, 1 x 12 29.2 and 82.3. One half: 6 x 4 10.7 and 30.1, 6 x 2 10.9 and 33.2, 3 x 8 11.3 and 31.0, 4 x 4 12.6 and 31.2,
2 x 8 12.2 and 33.4, 1 x 12 16.0 and 44.8. One product after the other takes the sum of both within 2 %."""
SHAPES_8_BITS: Final = {
    2: (WarpShape(3, 4), WarpShape(2, 4), *_ANY_8_BITS),
    1: (WarpShape(16, 1), WarpShape(8, 2), WarpShape(4, 3), *_ANY_8_BITS),
}
"""Of 8 bits. Blocks of FP8, 128 experts of 2048 x 768, 8 a token. Two halves, 1, 8 and 64 tokens: 3 x 4 11.0, 44.8 and 97.6,
2 x 4 11.9, 45.1 and 104.5, 4 x 2 12.5, 49.7 and 103.4. One half, 1, 2, 4, 8, 24 and 64 tokens: 16 x 1 8.2, 12.1, 17.0, 25.0,
42.0 and 53.2, 8 x 2 6.4, 13.0, 17.8, 25.6, 43.8 and 55.2, 4 x 3 6.7, 13.1, 18.4, 28.1, 49.6 and 62.5. A block has 1,024
threads at most: 31 warps that multiply."""
_ITEM_START_ROWS: Final = 8
"""Weight rows that could be read in the time in which an item begins and ends."""
_MEETING_ROWS: Final = 12
"""The same for each slice of an item of several tokens, whose warps' sums of 8 tokens or more meet."""
_MOST_WASTE: Final = 1.13
"""Slices that steps have room for, to those that there are, where another shape has less."""


class LaunchSpread(NamedTuple):
    """What a launch spreads over its blocks."""

    batches: int
    """Of pairs of one expert: those of a lone token, or as many as are expected."""
    blocks: int
    """Of the launch, at most."""
    lone: bool = False
    """Whether there is one token, whose pairs are batches of their own."""

    def busiest(self, rows: int, shape: WarpShape) -> int:
        """Weight rows that take as long as the block with the most items."""
        item_rows = _TILE_ROWS * shape.row_tiles
        besides = _ITEM_START_ROWS + (0 if self.lone else _MEETING_ROWS * shape.slices)
        return cdiv(self.batches * (rows // item_rows), self.blocks) * (item_rows + besides)


def spread_of(num_pairs: int, num_experts: int, block_t: int, blocks: int, *, lone: bool) -> LaunchSpread:
    """`num_pairs` pairs over `blocks` blocks. Experts of several tokens are expected to be drawn evenly."""
    if lone:
        return LaunchSpread(num_pairs, blocks, lone=True)
    drawn = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** num_pairs)
    return LaunchSpread(max(1, round(drawn), cdiv(num_pairs, block_t)), blocks)


@dataclass(frozen=True, slots=True)
class ExpertsCut:
    """How a product is cut: tokens of a batch, weight halves, boxes of 128 columns."""

    block_t: int
    halves: int
    boxes: int
    form: CodeForm
    shape: WarpShape
    lone: bool = False
    """Whether it is a lone token's."""

    @property
    def _held_tokens(self) -> int:
        """In shared memory."""
        return 1 if self.lone else self.block_t

    @property
    def item_rows(self) -> int:
        return _TILE_ROWS * self.shape.row_tiles

    @property
    def has_staged_scales(self) -> bool:
        """Whether scales come with the codes."""
        return self.form.group == 32

    @property
    def stage_bytes(self) -> int:
        scales = 8 if self.has_staged_scales else 0
        return self.halves * self.item_rows * self.shape.slices * (self.form.box_bytes + scales)

    @property
    def token_bytes(self) -> int:
        return 2 * self._held_tokens * BOX_COLUMNS * self.boxes

    @property
    def sum_bytes(self) -> int:
        """Of all slices' sums of an item."""
        return 4 * self.halves * self.item_rows * self._held_tokens * self.shape.slices

    def _stages_beside(self, sums: int) -> int:
        room = _SHARED_BYTES - 2048 - self.token_bytes - sums * self.sum_bytes
        return min(_MOST_STAGES, room // self.stage_bytes)

    @property
    def sums(self) -> int:
        """Places for the sums of items: with two, warps meet once an item."""
        return 2 if self._stages_beside(2) > _LEAST_STAGES else 1

    @property
    def stages(self) -> int:
        return self._stages_beside(self.sums)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.token_bytes + self.sums * self.sum_bytes + 1024

    @property
    def waste(self) -> float:
        return cdiv(self.boxes, self.shape.slices) * self.shape.slices / self.boxes


def cuts_of(
    weight: DeviceCodes, depth: int, halves: int, block_t: int, rows: int, spread: LaunchSpread
) -> list[ExpertsCut]:
    """All that there are of a product, the best first: steps must not be wasted, and items must be spread evenly. `rows`: of
    a half."""
    form = form_of(weight)
    if form is None or depth % 8 or not depth <= weight.cols:
        return []
    shapes = (SHAPES_8_BITS if form.box_bytes == SWIZZLED_BYTES else SHAPES)[halves]
    boxes = cdiv(weight.cols, BOX_COLUMNS)
    cuts = [ExpertsCut(block_t, halves, boxes, form, shape, spread.lone) for shape in shapes]
    cuts = [cut for cut in cuts if rows % cut.item_rows == 0 and cut.stages >= _LEAST_STAGES]
    return sorted(
        cuts,
        key=lambda cut: (0 if cut.waste <= _MOST_WASTE else cut.waste, spread.busiest(rows, cut.shape)),
    )


def _cut_of(
    weight: DeviceCodes, depth: int, halves: int, block_t: int, rows: int, spread: LaunchSpread
) -> ExpertsCut | None:
    return next(iter(cuts_of(weight, depth, halves, block_t, rows, spread)), None)


@rehearsed
@cache
def _kernel(device: torch.device, cut: ExpertsCut, gate: int, has_bias: bool) -> CudaKernel:
    defines: Mapping[str, int] = {
        "BLOCK_T": cut.block_t,
        "ROW_TILES": cut.shape.row_tiles,
        "SLICES": cut.shape.slices,
        "STAGES": cut.stages,
        "SUMS": cut.sums,
        "HALVES": cut.halves,
        "GATE": gate,
        "BIAS": int(has_bias),
        "SORTED": int(not cut.lone),
        "EARLY": int(cut.halves == 1),
        **cut.form.defines(),
    }
    cubin = cached_cubin(_SOURCE, "sm_90a", defines)
    threads = 32 * (cut.shape.row_tiles * cut.shape.slices + 1)
    return CudaKernel(cubin, "coded_experts", device, threads=threads, shared_bytes=cut.shared_bytes)


@rehearsed
@cache
def _is_ready(device: torch.device, cut: ExpertsCut) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    load = partial(_kernel, device, cut, GATES["silu"] if cut.halves == 2 else 0, False)
    return runs_on(device, load, "quantised experts of few tokens are read more slowly than they could be")


def block_tokens(kind: str, num_pairs: int, num_experts: int) -> int:
    """Tokens of a block. On an H200, us of a layer's products with 8 and 16: gpt-oss-20b in MXFP4 with 3 pairs of an expert
    209 and 238, with 8 299 and 250; Qwen3-30B-A3B in e4m3 with 4 pairs 194 and 242, with 6 221 and 247."""
    return 8 if num_pairs <= (8 if kind == "float8" else 5) * num_experts else 16


def suits(x_TD: Tensor, gate_up: object, down: object, num_experts: int, num_pairs: int, activation: str) -> bool:
    """Whether the kernel serves these experts, and faster than the portable kernels do."""
    if not isinstance(gate_up, DeviceCodes) or not isinstance(down, DeviceCodes) or activation != "silu":
        return False
    most = _MOST_PER_EXPERT if gate_up.kind == "float8" else _MOST_PER_EXPERT_OF_4_BITS
    if x_TD.dtype != torch.bfloat16 or num_pairs > most * num_experts or not can_map(x_TD):
        return False
    width, inner = x_TD.shape[1], gate_up.num_rows // num_experts // 2
    if not (can_map(gate_up.codes) and can_map(down.codes)):
        return False
    block_t = block_tokens(gate_up.kind, num_pairs, num_experts)
    spread = spread_of(num_pairs, num_experts, block_t, num_sms(x_TD.device), lone=len(x_TD) == 1)
    cuts = [_cut_of(gate_up, width, 2, block_t, inner, spread), _cut_of(down, inner, 1, block_t, width, spread)]
    if any(
        cut is None or (cut.has_staged_scales and not can_map(weight.scales))
        for cut, weight in zip(cuts, (gate_up, down), strict=True)
    ):
        return False
    return all(cut is not None and _is_ready(x_TD.device, cut) for cut in cuts)


def work_of(
    x: Tensor, out: Tensor, order: Sorted, per_token: int, boxes: int, bias: Tensor | None, clamp: ClampedGate | None
) -> ExpertsWork:
    """The arguments that describe a product to the kernels. The tensors must outlive the kernel."""
    return ExpertsWork(
        x.data_ptr(), order.block_expert.data_ptr(), order.pairs.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), x.stride(0), out.shape[0], per_token, out.shape[1], x.shape[1], boxes, order.num_blocks,
        order.num_experts, 0.0 if clamp is None else clamp.alpha, 0.0 if clamp is None else clamp.limit,
    )  # fmt: skip


def product(
    x: Tensor,
    weight: DeviceCodes,
    out: Tensor,
    order: Sorted,
    *,
    block_t: int,
    per_token: int,
    halves: int,
    bias: Tensor | None = None,
    clamp: ClampedGate | None = None,
    cut: ExpertsCut | None = None,
) -> None:
    """Fills out [pairs, rows], with two `halves` gated by silu or `clamp`. `bias` [E, halves * rows] in bf16. Needs
    `suits`.

    With one half, the kernel before must be the product of two, with the same `order`: the choice of experts is read before
    that has ended.
    """
    rows, device = out.shape[1], x.device
    if cut is None:
        spread = spread_of(out.shape[0], order.num_experts, block_t, num_sms(device), lone=not order.is_sorted)
        cut = _cut_of(weight, x.shape[1], halves, block_t, rows, spread)
    assert cut is not None
    assert cut.lone != order.is_sorted
    gate = 0 if halves == 1 else GATES["silu" if clamp is None else "clamped"]
    kernel = _kernel(device, cut, gate, bias is not None)
    work = work_of(x, out, order, per_token, cut.boxes, bias, clamp)
    box_bytes = cut.form.box_bytes
    codes = tensor_map(weight.codes, cut.item_rows, box_bytes if box_bytes < SWIZZLED_BYTES else None)
    scales = codes
    if cut.has_staged_scales:
        scales = tensor_map(weight.scales, BOX_COLUMNS // cut.form.group * cut.shape.slices, cut.item_rows)
    items = order.num_blocks * (rows // cut.item_rows)
    blocks = min(items, num_sms(device))
    kernel.launch(blocks, (codes, scales, besides_codes(weight), work), current_stream(device))
