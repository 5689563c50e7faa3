# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Experts in codes for many tokens of each, on Hopper: a stack of weights at a time is dequantised, and multiplied as bf16.

Products that decode weights as they stream decode them once for each tile of tokens. With many tokens it is faster to do it
once for all, into memory that the memory plan sets aside, and to take the tensor cores' fastest kernel from there.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.config.step_memory import MOST_UNPACKED_EXPERTS
from bough.kernels.launching import cdiv, pdl_options, power_of_two, trigger, wait
from bough.kernels.moe import Biases, grouped_hopper
from bough.kernels.moe.grouping import Grouping, group_tokens, sum_parts
from bough.kernels.packed_linear.decode import DeviceCodes, dequantise_rows
from bough.kernels.packed_linear.gguf_triton import DeviceBlocks

LEAST_PAIRS: Final = 160
"""Pairs of an expert, on average, from which on it pays. On an H200 products that decode take 1.1 ms for a layer of
gpt-oss-20b with 125 pairs of each expert, and 15.8 ms with 2,000. Writing and reading it as bf16 takes about 0.9 ms."""


def suits(
    x_TD: Tensor,
    gate_up: DeviceCodes | DeviceBlocks,
    down: DeviceCodes | DeviceBlocks,
    num_experts: int,
    num_pairs: int,
    activation: str,
) -> bool:
    """Whether `experts` serves these, and is the fastest that does."""
    if num_pairs < LEAST_PAIRS * num_experts or activation != "silu" or x_TD.dtype != torch.bfloat16:
        return False
    if not isinstance(gate_up, DeviceCodes) or not isinstance(down, DeviceCodes):
        return False
    width, inner = x_TD.shape[1], gate_up.num_rows // num_experts // 2
    return (
        2 * gate_up.num_rows * width <= MOST_UNPACKED_EXPERTS
        and grouped_hopper.takes(width, inner, torch.bfloat16)
        and grouped_hopper.is_ready(x_TD.device, inner, width, False)
    )


def experts(
    x_TD: Tensor,
    gate_up: DeviceCodes,
    down: DeviceCodes,
    num_experts: int,
    biases: Biases | None,
    clamp: ClampedGate | None,
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    out_TD: Tensor,
) -> None:
    """As `packed_experts` with silu, or with `clamp` and biases, into out_TD."""
    width, inner = x_TD.shape[1], gate_up.num_rows // num_experts // 2
    cut = grouped_hopper.cut_for(ids_Tk.numel(), num_experts, inner, width)
    grouping, rows, _ = group_tokens(x_TD, ids_Tk, num_experts, cut.height, fp8=False)
    dense = _dequantised(gate_up, num_experts, width)
    if clamp is None:
        hidden = torch.empty((grouping.num_rows, inner), dtype=torch.bfloat16, device=x_TD.device)
        grouped_hopper.product(rows, dense, hidden, grouping, cut.gate_up, None, None, gated=True)
    else:
        assert biases is not None, "experts with a clamped gate have biases"
        raw = torch.empty((grouping.num_rows, 2 * inner), dtype=torch.bfloat16, device=x_TD.device)
        grouped_hopper.product(rows, dense, raw, grouping, cut.down, None, None, gated=False)
        hidden = clamped_rows(raw, biases.gate_up_E2F, grouping, cut.height, clamp)
    del dense  # the next stack takes its memory
    dense = _dequantised(down, num_experts, inner)
    grouped_hopper.product(hidden, dense, rows, grouping, cut.down, None, None, gated=False)
    sum_parts(rows, weights_Tk, grouping, out_TD)
    if biases is not None:
        add_biases(out_TD, biases.down_ED, weights_Tk, ids_Tk)


def _dequantised(weight: DeviceCodes, num_experts: int, depth: int) -> Tensor:
    out = torch.empty((weight.num_rows, depth), dtype=torch.bfloat16, device=weight.codes.device)
    dequantise_rows(weight, depth, out)
    return out.view(num_experts, -1, depth)


def add_biases(out_TD: Tensor, bias_ED: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> None:
    """Adds the weighed biases of each token's experts; ids of experts elsewhere add nothing."""
    here = (ids_Tk >= 0) & (ids_Tk < len(bias_ED))
    shares_TE = weights_Tk.new_zeros((len(ids_Tk), len(bias_ED)))
    shares_TE.scatter_add_(1, ids_Tk.long().clamp(0, len(bias_ED) - 1), weights_Tk * here)
    out_TD += (shares_TE @ bias_ED.to(shares_TE.dtype)).to(out_TD.dtype)


@triton.jit
def _clamped_kernel(
    raw,
    bias,
    tiles,
    num_tiles,
    out,
    inner,
    alpha,
    limit,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    trigger(PDL)
    wait(PDL)
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        first = tl.load(tiles + tile * 4)
        end = tl.minimum(tl.load(tiles + tile * 4 + 1), first + HEIGHT)
        expert = tl.load(tiles + tile * 4 + 2).to(tl.int64)
        unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = unit < inner
        gate_bias = tl.load(bias + expert * (2 * inner) + unit, mask=inside, other=0.0).to(tl.float32)
        up_bias = tl.load(bias + expert * (2 * inner) + inner + unit, mask=inside, other=0.0).to(tl.float32)
        for base in range(0, HEIGHT, ROWS):
            row = first + base + tl.arange(0, ROWS)
            real = (row < end)[:, None] & inside[None, :]
            at = raw + row.to(tl.int64)[:, None] * (2 * inner) + unit[None, :]
            gate = tl.load(at, mask=real, other=0.0).to(tl.float32) + gate_bias[None, :]
            up = tl.load(at + inner, mask=real, other=0.0).to(tl.float32) + up_bias[None, :]
            gate = tl.minimum(gate, limit)
            up = tl.clamp(up, -limit, limit)
            value = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
            out_at = out + row.to(tl.int64)[:, None] * inner + unit[None, :]
            tl.store(out_at, value.to(out.dtype.element_ty), mask=real)


def clamped_rows(raw_PF: Tensor, bias_E2F: Tensor, grouping: Grouping, height: int, clamp: ClampedGate) -> Tensor:
    """[rows, F]: `clamped_gate` of the grouped rows with their experts' biases. Rows of no expert are not filled."""
    inner = raw_PF.shape[1] // 2
    out = raw_PF.new_empty((raw_PF.shape[0], inner))
    block = min(512, power_of_two(inner))
    _clamped_kernel[(grouping.tiles.shape[0], cdiv(inner, block))](
        raw_PF,
        bias_E2F,
        grouping.tiles,
        grouping.num_tiles,
        out,
        inner,
        clamp.alpha,
        clamp.limit,
        HEIGHT=height,
        ROWS=8,
        BLOCK=block,
        num_warps=4,
        **pdl_options(raw_PF.device),
    )
    return out
