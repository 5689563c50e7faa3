"""Rounding to the nearest: floats to `Codes`, for weights that are quantised while loading, for random weights, and as the
measure of better methods."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.packed_linear import Codes, Inputs
from bough.kernels.packed_linear.codes import E2M1, TABLES, CodeKind
from bough.quantization.formats import (
    Awq,
    BitsAndBytes4,
    BitsAndBytes8,
    Eight,
    Four,
    Gptq,
    InputRounding,
    Online,
    PackedInts,
    WeightFormat,
)

FLOAT8_MAX: Final = 448.0
_LEAST: Final = 1e-12
"""Scales are at least this, so that a group of zeros has one."""

ONLINE: Final[dict[str, WeightFormat]] = {
    "fp8": Eight("float8", inputs=InputRounding("float8")),
    "fp8_block": Eight("float8", block=(128, 128), inputs=InputRounding("float8", group=128)),
    "int8": Eight("int8", inputs=InputRounding("int8")),
    "int8_weight": Eight("int8"),
    "mxfp8": Eight(
        "float8", block=(1, 32), exponents=True, inputs=InputRounding("float8", group=32, power_of_two=True)
    ),
    "mxfp4": Four("mx"),
}


def quantise(form: WeightFormat, weight_OD: Tensor) -> Codes:
    """The weight in a format's numbers, each rounded to the nearest. Made for where the numbers are, not how they are
    stored: what reads a checkpoint of that format gives codes of the same kind and shape."""
    weight = weight_OD.float()
    match form:
        case Online():
            return (
                quantise_ints(weight, 4, _fitting(form.group, weight))
                if form.to == "int4"
                else quantise(ONLINE[form.to], weight)
            )
        case Eight():
            return _eight(form, weight)
        case Awq():
            return quantise_ints(weight, 4, _fitting(form.group, weight), symmetric=not form.zeros)
        case Gptq():
            codes = quantise_ints(weight, form.bits, _fitting(form.group, weight), symmetric=form.symmetric)
            return replace(codes, scale_OG=codes.scale_OG.half())  # as checkpoints store them
        case PackedInts():
            return quantise_ints(
                weight, form.bits, _fitting(form.group, weight), symmetric=form.symmetric, inputs=_inputs(form.inputs)
            )
        case Four():
            return _four(form, weight)
        case BitsAndBytes4():
            return _table(form.kind, weight, _fitting(64, weight))
        case BitsAndBytes8():
            return _eight(Eight("int8"), weight)


def _fitting(group: int, weight: Tensor) -> int:
    """The group, or the largest part of it that divides the columns."""
    return math.gcd(group, weight.shape[1]) if group > 0 else weight.shape[1]


def _inputs(rounding: InputRounding | None) -> Inputs | None:
    """Static scales are unknown here, so that activations are taken as they come."""
    if rounding is None:
        return None
    return Inputs(rounding.kind, rounding.group, power_of_two=rounding.power_of_two)


def _blocks(weight: Tensor, rows: int, cols: int) -> Tensor:
    """[R, rows, C, cols], padded with zeros."""
    padded = F.pad(weight, (0, -weight.shape[1] % cols, 0, -weight.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)


def _eight(form: Eight, weight: Tensor) -> Codes:
    (num_rows, num_cols) = weight.shape
    down, across = form.block or (num_rows if form.per == "tensor" else 1, num_cols)
    blocks = _blocks(weight, down, across)
    most = FLOAT8_MAX if form.kind == "float8" else 127.0
    scale = (blocks.abs().amax((1, 3), keepdim=True) / most).clamp(min=_LEAST)
    if form.exponents:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scaled = (blocks / scale).clamp(-most, most)
    if form.kind == "float8":
        values = scaled.view(scaled.shape[0] * down, -1)[:num_rows, :num_cols].to(torch.float8_e4m3fn)
    else:
        signed = scaled.round().view(scaled.shape[0] * down, -1)[:num_rows, :num_cols].to(torch.int8)
        values = signed.view(torch.uint8) ^ 128
    return Codes(
        form.kind, values.contiguous(), scale[:, 0, :, 0].contiguous(), across, rows=down, inputs=_inputs(form.inputs)
    )


def quantise_ints(
    weight: Tensor, bits: int, group: int, *, symmetric: bool = False, inputs: Inputs | None = None
) -> Codes:
    """Integers of `bits` with a scale, and a zero point unless `symmetric`, for each `group` columns, which divides them.

    Codes of fewer than 4 bits lie in the middle of those of 4, those of 5 to 7 in the middle of those of 8.
    """
    scale, zero = int_grid(weight, bits, group, symmetric=symmetric)
    return codes_on_grid(weight, scale, zero, bits, group, inputs)


def int_grid(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """(scales, zero points), float32 [O, G], of the smallest grid that holds every group's values."""
    grouped = weight.view(weight.shape[0], -1, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = (grouped.abs().amax(-1) * 2 / top).clamp(min=_LEAST)
        return scale, torch.full_like(scale, 1 << (bits - 1))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = ((high - low) / top).clamp(min=_LEAST)
    return scale, (-low / scale).round().clamp(0, top)


def codes_on_grid(
    weight: Tensor, scale_OG: Tensor, zero_OG: Tensor, bits: int, group: int, inputs: Inputs | None = None
) -> Codes:
    """The nearest codes of a grid."""
    grouped = weight.view(weight.shape[0], -1, group)
    values = (grouped / scale_OG[..., None] + zero_OG[..., None]).round().clamp(0, (1 << bits) - 1)
    kind: CodeKind = "int4" if bits <= 4 else "int8"
    middle = 1 << (bits - 1)
    shift = (8 if kind == "int4" else 128) - middle
    default = bool((zero_OG == middle).all())
    return Codes(
        kind,
        (values.view(weight.shape) + shift).to(torch.uint8),
        scale_OG,
        group,
        zero_OG=None if default else (zero_OG + shift).to(torch.uint8),
        inputs=inputs,
    )


def nearest_in(table: Tensor, values: Tensor) -> Tensor:
    """uint8: where in an ascending table each value's nearest is; halfway, the even place."""
    between = (table[1:] + table[:-1]) / 2
    place = torch.bucketize(values, between)  # the place below a value that is halfway...
    halfway = (place < len(between)) & (values == between[place.clamp(max=len(between) - 1)])
    return (place + (halfway & (place % 2 == 1))).to(torch.uint8)


def _four(form: Four, weight: Tensor) -> Codes:
    group = 32 if form.scales == "mx" else 16
    num_rows, num_cols = weight.shape
    grouped = F.pad(weight, (0, -num_cols % group)).view(num_rows, -1, group)
    largest = grouped.abs().amax(-1)
    whole: Tensor | None = None
    if form.scales == "mx":
        scale = torch.exp2((torch.floor(torch.log2(largest.clamp(min=2.0**-120))) - 2).clamp(-127, 127))
    else:
        factor = (largest.max() / (6 * FLOAT8_MAX)).clamp(min=_LEAST)
        scale = (largest / 6 / factor).to(torch.float8_e4m3fn).float().clamp(min=2.0**-9)
        whole = factor.expand(num_rows).contiguous()
    magnitude = grouped.abs() / scale[..., None]
    if whole is not None:
        magnitude = magnitude / whole[:, None, None]
    codes = nearest_in(torch.tensor(E2M1, device=weight.device), magnitude) | (grouped < 0).to(torch.uint8) << 3
    values = codes.view(num_rows, -1)[:, :num_cols].contiguous()
    return Codes("float4", values, scale.bfloat16(), group, row_scale_O=whole)


def _table(kind: CodeKind, weight: Tensor, group: int) -> Codes:
    table = torch.tensor(TABLES[kind], device=weight.device)
    ascending, order = table.sort()
    grouped = weight.view(weight.shape[0], -1, group)
    scale = grouped.abs().amax(-1).clamp(min=_LEAST)
    place = torch.bucketize(grouped / scale[..., None], (ascending[1:] + ascending[:-1]) / 2)
    return Codes(kind, order[place].to(torch.uint8).view(weight.shape), scale, group)
