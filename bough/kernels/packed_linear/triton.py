# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Packed weights on a GPU.

Few tokens: the packed weight streams through the multiprocessors once and is multiplied as it is, cut as `linear.skinny`
cuts plain ones (on Hopper, e4m3 and INT4 by `terms` or by `hopper`, whichever is faster and has whole tiles). Many
tokens: e4m3 with a scale per row is multiplied with activations rounded to e4m3, if the device has such arithmetic and the
checkpoint asks for it, and so are blocks of e4m3 by `rounded`, where it takes them; other weights are dequantised, and the
vendor's library multiplies.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.choices import facts_of
from bough.kernels.launching import cdiv, num_sms, pdl_options, power_of_two, trigger, wait
from bough.kernels.linear.skinny import SCRATCH, sum_partials
from bough.kernels.moe.grouping import round_rows
from bough.kernels.packed_linear import gguf_triton, hopper, reference, rounded, terms
from bough.kernels.packed_linear.codes import CODE_BITS, CodeKind, Codes, activation_order, in_order, out_of_order
from bough.kernels.packed_linear.decode import DeviceCodes, add_product, dequantise_rows, last_scale, lay_out
from bough.kernels.packed_linear.gguf_parts import take_apart
from bough.kernels.packed_linear.gguf_triton import DeviceBlocks
from bough.kernels.packed_linear.groups import GROUP, rounded_tokens
from bough.kernels.packed_linear.weight import PackedWeight

_INTEGERS: Final[dict[str, CodeKind]] = {"Q4_0": "int4", "Q8_0": "int8"}
FEW_TOKENS: Final = 64
"""Up to here weights are multiplied as they are..."""
_FEW_ROUNDED: Final = 32
"""...unless tensor cores take them with rounded activations: an H200 needs 89 us for 48 tokens with four of a Llama's
weights, rounding included, and 92 for 32 where they are split into two terms."""


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """How the product is cut: weight rows of a tile, warps, stages, and programs on a multiprocessor."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def cut_for(tokens: int, weight: DeviceCodes) -> PackedTiling:
    """The fastest of several on an H200, summed over three of a Llama's weights: for 1, 16, 32 and 64 tokens INT4 takes 88,
    89, 103 and 146 us, MXFP4 127, 128, 123 and 178, e4m3 in blocks 111, 112, 133 and 146."""
    if CODE_BITS[weight.kind] == 4:
        return PackedTiling(128, 8 if tokens <= 32 else 4, 4, 2)
    if tokens <= 16:
        return PackedTiling(64, 4, 6, 3)
    return PackedTiling(128, 4, 4, 2) if tokens <= 32 else PackedTiling(64, 4, 4, 2)


@triton.jit(do_not_specialize=["T", "per_chunk", "total", "k_steps"])
def _packed_kernel(
    x,
    codes,
    scales,
    zeros,
    row_scales,
    table,
    bias,
    out,
    partial,
    counters,
    T,
    rows,
    depth,
    cols,
    width,
    x_stride,
    out_stride,
    per_chunk,
    total,
    k_steps,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `linear.skinny`'s: chunks of a stream of (tile of rows, step along D); who ends a tile last adds its parts up."""
    chunk = tl.program_id(0)
    at = chunk * per_chunk
    end = tl.minimum(at + per_chunk, total)
    trigger(PDL)
    wait(PDL)
    token = tl.arange(0, BLOCK_T)
    real = token < T
    while at < end:
        tile = at // k_steps
        k_start = at - tile * k_steps
        k_end = tl.minimum(k_steps, k_start + end - at)
        row = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = row < rows
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for step in tl.range(k_start, k_end):
            acc = add_product(
                acc, x, token.to(tl.int64), real, depth, x_stride, codes, scales, zeros, table, width, row, inside,
                step * BLOCK_K, cols, KIND, ZERO, GROUP, SCALE_ROWS, NATIVE, PTX, PRECISION, BLOCK_K,
            )  # fmt: skip
        first = tile * k_steps // per_chunk
        last = (tile * k_steps + k_steps - 1) // per_chunk
        finish = first == last
        if first != last:
            place = tl.cast(2 * chunk, tl.int64) + tl.where(chunk == first, 1, 0)
            offset = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + token[None, :]
            tl.store(partial + place * (BLOCK_N * BLOCK_T) + offset, acc)
            tl.debug_barrier()
            done = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            finish = done == last - first
            if finish:
                tl.store(counters + tile, 0)
                acc = sum_partials(partial, first, last, BLOCK_N, BLOCK_T)
        if finish:
            acc = last_scale(acc, scales, row_scales, row, inside, GROUP, ROW_SCALE, SCALE_ROWS)
            if BIAS:
                acc += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
            out_at = out + token.to(tl.int64)[None, :] * out_stride + row[:, None]
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=real[None, :] & inside[:, None])
        at += k_end - k_start


def pack(kind: str, raw: Tensor, cols: int) -> PackedWeight:
    """GGUF's blocks in their own bits; by the reference what has no blocks."""
    if kind in gguf_triton.KINDS:
        made = gguf_triton.lay_out_blocks(take_apart(kind, raw, cols))
        return PackedWeight(kind, raw.shape[0], cols, made.tensors, functions=sys.modules[__name__], handle=made)
    if kind not in _INTEGERS:
        return reference.pack(kind, raw, cols)
    return replace(pack_codes(integer_codes(kind, raw, cols)), kind=kind)


def integer_codes(kind: str, raw: Tensor, cols: int) -> Codes:
    """GGUF's blocks of integers with one scale each, as codes."""
    parts = take_apart(kind, raw, cols)
    return Codes(_INTEGERS[kind], parts.codes_OD, parts.scale_OG, parts.group)


def pack_codes(codes: Codes) -> PackedWeight:
    """By the reference if the columns that share a scale are too few."""
    codes = codes.sorted()
    made = lay_out(codes)
    if made is None:
        return reference.pack_codes(codes)
    return PackedWeight(
        codes.kind,
        codes.shape[0],
        codes.num_inputs,
        made.tensors,
        functions=sys.modules[__name__],
        handle=made,
        order=activation_order(codes),
        inputs=codes.inputs,
    )


def packed_linear(
    x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None = None, *, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    if x_TD.dim() != 2:
        made = packed_linear(x_TD.reshape(-1, x_TD.shape[-1]), weight, bias_O, exact=exact)
        made = made.view(*x_TD.shape[:-1], weight.rows)
        return made if out is None else out.copy_(made)
    if weight.order is not None:
        x_TD = in_order(x_TD, weight.order)
    if isinstance(weight.handle, DeviceBlocks):
        return _linear_of_blocks(x_TD, weight, bias_O, out)
    if not exact:
        grouped = _multiply_grouped(x_TD, weight, bias_O, out)
        if grouped is not None:
            return grouped
    rounds = not exact and _rounds(x_TD, weight)
    if x_TD.shape[0] <= (_FEW_ROUNDED if rounds else FEW_TOKENS):
        return multiply(x_TD, weight.handle, bias_O, x_TD.new_empty(len(x_TD), weight.rows) if out is None else out)
    if rounds:
        result = _multiply_rounded(x_TD, weight.handle, bias_O)
    else:
        dense = x_TD.new_empty(weight.rows, x_TD.shape[1])
        dequantise_rows(weight.handle, dense.shape[1], dense)
        result = F.linear(x_TD, dense, None if bias_O is None else bias_O.to(x_TD.dtype))
    return result if out is None else out.copy_(result)


def _linear_of_blocks(x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None, out: Tensor | None) -> Tensor:
    if x_TD.shape[0] <= FEW_TOKENS:
        room = x_TD.new_empty(len(x_TD), weight.rows) if out is None else out
        return gguf_triton.multiply_blocks(x_TD, weight.handle, bias_O, room)
    dense = x_TD.new_empty(weight.rows, weight.cols)
    gguf_triton.block_rows(weight.handle, weight.cols, dense)
    result = F.linear(x_TD, dense, None if bias_O is None else bias_O.to(x_TD.dtype))
    return result if out is None else out.copy_(result)


def multiply(x_TD: Tensor, weight: DeviceCodes, bias_O: Tensor | None, out: Tensor) -> Tensor:
    """x @ weight.T (+ bias) into out [T, O], whose rows are contiguous; for `FEW_TOKENS` or less."""
    tokens, depth = x_TD.shape
    if tokens == 0:
        return out
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    split = terms.cut_for(x, weight, bias_O, out)
    if split is not None:
        terms.multiply_terms(x, weight, bias_O, out, split)
        return out
    ring = hopper.cut_for(x, weight, bias_O, out)
    if ring is not None:
        hopper.multiply_codes(x, weight, bias_O, out, ring)
        return out
    device, rows = x.device, weight.codes.shape[0]
    block_t = power_of_two(tokens, 16)
    cut = cut_for(tokens, weight)
    k_steps, tiles = cdiv(weight.cols, weight.step), cdiv(rows, cut.block_n)
    total = tiles * k_steps
    per_chunk = cdiv(total, num_sms(device) * cut.programs_per_sm)
    programs = cdiv(total, per_chunk)
    partial, counters = SCRATCH.get(device, 2 * programs * cut.block_n * block_t, tiles)
    _packed_kernel[(programs,)](
        x,
        *weight.arguments(),
        weight.scales if bias_O is None else bias_O,
        out,
        partial,
        counters,
        tokens,
        rows,
        depth,
        weight.cols,
        weight.scales.shape[1],
        x.stride(0),
        out.stride(0),
        per_chunk,
        total,
        k_steps,
        **weight.constants(),
        BIAS=bias_O is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_T=block_t,
        BLOCK_N=cut.block_n,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **pdl_options(device),
    )
    return out


def _rounds(x_TD: Tensor, weight: PackedWeight) -> bool:
    """Whether `_multiply_rounded` serves: scales of rows, sizes that the vendor's library takes, a device with e4m3."""
    form: DeviceCodes = weight.handle
    if weight.inputs is None or weight.inputs.kind != "float8" or form.kind != "float8" or form.group != 0:
        return False
    even = form.cols == x_TD.shape[1] and form.cols % 16 == weight.rows % 16 == 0
    facts = facts_of(x_TD.device.type, x_TD.device.index)
    return even and x_TD.dtype == torch.bfloat16 and facts.capability >= (8, 9)


def _multiply_rounded(x_TD: Tensor, weight: DeviceCodes, bias_O: Tensor | None) -> Tensor:
    """Activations become e4m3 with a scale each, whatever the checkpoint calibrated: that is at least as fine. Sums are left
    to the tensor cores, whose 14 bits lose far less than the rounding did."""
    x, scale_T = round_rows(x_TD.contiguous())
    made = x_TD.new_empty(len(x), weight.num_rows)
    cut = rounded.cut_for(len(x), weight, bias_O, made)
    if cut is not None:
        rounded.multiply_rounded(x, scale_T, weight, bias_O, made, cut)
        return made
    scale_O = weight.scales.float()
    if weight.row_scales is not None:
        scale_O = scale_O * weight.row_scales
    out: Tensor = torch._scaled_mm(
        x,
        weight.codes.view(torch.float8_e4m3fn).t(),
        scale_a=scale_T.view(-1, 1),
        scale_b=scale_O,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    # The library has no product with scales of rows and a bias for every number of tokens.
    return out if bias_O is None else out.add_(bias_O)


def _multiply_grouped(x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None, out: Tensor | None) -> Tensor | None:
    """Blocks of e4m3 with activations in e4m3 that have a scale per 128 columns, where the checkpoint asks for that; None if
    something else serves these."""
    held, asked, tokens = weight.handle, weight.inputs, len(x_TD)
    if asked is None or asked.kind != "float8" or asked.group != GROUP or asked.scale is not None:
        return None
    if tokens <= _FEW_ROUNDED or held.group != GROUP or held.cols != x_TD.shape[1] or x_TD.dtype != torch.bfloat16:
        return None
    made = x_TD.new_empty(tokens, weight.rows) if out is None else out
    cut = rounded.cut_for(tokens, held, bias_O, made)
    if cut is None:
        return None
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    codes, scales = rounded_tokens(x, rounded.block_of(tokens), powers=asked.power_of_two)
    rounded.multiply_rounded(codes, scales, held, bias_O, made, cut)
    return made


def packed_rows(ids_T: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    width = weight.cols if weight.order is None else weight.order.shape[0]
    out = torch.empty((ids_T.numel(), width), dtype=dtype, device=ids_T.device)
    fill = gguf_triton.block_rows if isinstance(weight.handle, DeviceBlocks) else dequantise_rows
    fill(weight.handle, width, out, ids_T.reshape(-1).contiguous())
    if weight.order is not None:
        out = out_of_order(out, weight.order, weight.cols)
    return out.view(*ids_T.shape, weight.cols)


def dequantise(weight: PackedWeight) -> Tensor:
    width = weight.cols if weight.order is None else weight.order.shape[0]
    out = torch.empty((weight.rows, width), dtype=torch.float32, device=weight.data[0].device)
    fill = gguf_triton.block_rows if isinstance(weight.handle, DeviceBlocks) else dequantise_rows
    fill(weight.handle, width, out)
    return out if weight.order is None else out_of_order(out, weight.order, weight.cols)
