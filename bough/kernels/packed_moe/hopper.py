"""Experts in codes for few tokens of each, on Hopper: two launches of `hopper.cu`, a product each, with biases and gates."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bough.config.model_facts import ClampedGate
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
_ROWS: Final = 64
"""Weight rows of an item."""
_SHARED_BYTES: Final = 225 << 10
"""Of a multiprocessor, for all blocks on it."""
_MOST_STAGES: Final = 8
_LEAST_STAGES: Final = 3
_GATES: Final = {"silu": 1, "clamped": 2}
_MOST_PER_EXPERT: Final = 12
"""Pairs of an expert in e4m3, on average: beyond, blocks of 16 tokens read weights too often. On an H200, layers of
Qwen3-30B-A3B take 25, 62, 133, 195 and 214 us for 1, 4, 16, 64 and 100 tokens, 49, 73, 179, 264 and 270 in Triton."""
_MOST_PAIRS_OF_4_BITS: Final = 16
"""Pairs of experts in codes of 4 bits: gpt-oss-20b's layers take 60, 121 and 199 us for 1, 2 and 4 tokens, 166, 277 and 470
in Triton, which is faster with more."""


class _Work(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "batch_expert", "pairs", "bias", "out")),
        ("x_stride", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in ("num_pairs", "per_token", "rows", "depth", "k_steps", "num_batches", "experts")
        ),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a product is cut: tokens of a block, columns of a step, weight halves."""

    block_t: int
    block_k: int
    halves: int
    k_steps: int
    form: CodeForm

    @property
    def stage_bytes(self) -> int:
        return self.halves * _ROWS * self.block_k // BOX_COLUMNS * self.form.box_bytes

    @property
    def token_bytes(self) -> int:
        return 2 * self.block_t * self.block_k * self.k_steps

    def stages(self, programs: int) -> int:
        room = _SHARED_BYTES // programs - 2048 - self.token_bytes
        return min(_MOST_STAGES, room // self.stage_bytes)

    @property
    def programs(self) -> int:
        """Of a multiprocessor; 0: there is no room for one."""
        return next((count for count in (2, 1) if self.stages(count) >= _LEAST_STAGES), 0)


def _cut_of(weight: DeviceCodes, depth: int, halves: int, block_t: int) -> _Cut | None:
    form = form_of(weight)
    if form is None or depth % 8 or not depth <= weight.cols:
        return None
    steps = [block for block in (256, BOX_COLUMNS) if weight.group != BOX_COLUMNS or weight.cols % block == 0]
    for block_k in steps:
        cut = _Cut(block_t, block_k, halves, cdiv(weight.cols, block_k), form)
        if cut.programs:
            return cut
    return None


@cache
def _kernel(device: torch.device, cut: _Cut, gate: int, has_bias: bool, is_sorted: bool) -> CudaKernel:
    stages = cut.stages(cut.programs)
    defines: Mapping[str, int] = {
        "BLOCK_T": cut.block_t,
        "BLOCK_K": cut.block_k,
        "GROUPS": 1,
        "STAGES": stages,
        "HALVES": cut.halves,
        "GATE": gate,
        "BIAS": int(has_bias),
        "SORTED": int(is_sorted),
        **cut.form.defines(),
    }
    cubin = cached_cubin(_SOURCE, "sm_90a", defines)
    room = stages * cut.stage_bytes + cut.token_bytes + 1024
    return CudaKernel(cubin, "coded_experts", device, threads=128 + 32, shared_bytes=room)


@cache
def _is_ready(device: torch.device, cut: _Cut) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    load = partial(_kernel, device, cut, _GATES["silu"] if cut.halves == 2 else 0, False, True)
    return runs_on(device, load, "quantised experts of few tokens are read more slowly than they could be")


def block_tokens(num_pairs: int, num_experts: int) -> int:
    """Tokens of a block."""
    return 8 if num_pairs <= 4 * num_experts else 16


def suits(x_TD: Tensor, gate_up: object, down: object, num_experts: int, num_pairs: int, activation: str) -> bool:
    """Whether the kernel serves these experts, and faster than the portable kernels do."""
    if not isinstance(gate_up, DeviceCodes) or not isinstance(down, DeviceCodes) or activation != "silu":
        return False
    most = _MOST_PER_EXPERT * num_experts if gate_up.kind == "float8" else _MOST_PAIRS_OF_4_BITS
    if x_TD.dtype != torch.bfloat16 or num_pairs > most or not can_map(x_TD):
        return False
    width, inner = x_TD.shape[1], gate_up.num_rows // num_experts // 2
    if width % _ROWS or inner % _ROWS or not (can_map(gate_up.codes) and can_map(down.codes)):
        return False
    block_t = block_tokens(num_pairs, num_experts)
    cuts = [_cut_of(gate_up, width, 2, block_t), _cut_of(down, inner, 1, block_t)]
    return all(cut is not None and _is_ready(x_TD.device, cut) for cut in cuts)


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
) -> None:
    """Fills out [pairs, rows], with two `halves` gated by silu or `clamp`. `bias` [E, halves * rows] in bf16. Needs
    `suits`."""
    rows, device = out.shape[1], x.device
    cut = _cut_of(weight, x.shape[1], halves, block_t)
    assert cut is not None
    gate = 0 if halves == 1 else _GATES["silu" if clamp is None else "clamped"]
    kernel = _kernel(device, cut, gate, bias is not None, order.is_sorted)
    work = _Work(
        x.data_ptr(), order.block_expert.data_ptr(), order.pairs.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), x.stride(0), out.shape[0], per_token, rows, x.shape[1], cut.k_steps, order.num_blocks,
        order.num_experts, 0.0 if clamp is None else clamp.alpha, 0.0 if clamp is None else clamp.limit,
    )  # fmt: skip
    box_bytes = cut.form.box_bytes
    codes = tensor_map(weight.codes, _ROWS, box_bytes if box_bytes < SWIZZLED_BYTES else None)
    items = order.num_blocks * (rows // _ROWS)
    blocks = min(items, cut.programs * num_sms(device))
    kernel.launch(blocks, (codes, besides_codes(weight), work), current_stream(device))
