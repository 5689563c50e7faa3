"""How a checkpoint stores one weight, as data. Needs no torch.

A reader of a checkpoint's configuration (`read/`) gives every layer one of these, a layout (`layouts/`) reads it. [O, D] is
the shape of a weight, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class InputRounding:
    """How activations are to be rounded before a product, as the configuration says. Kernels may round less."""

    kind: Literal["float8", "int8"]
    static: bool = False
    """The checkpoint has one scale for all tokens (`input_scale`); otherwise a token's largest value gives it."""
    group: int | None = None
    """Columns that share a scale; None: a token's all."""
    symmetric: bool = True
    """Otherwise the checkpoint has an `input_zero_point` too."""
    power_of_two: bool = False


@dataclass(frozen=True, slots=True)
class Eight:
    """One byte per weight, [O, D] as it is, beside its scales."""

    kind: Literal["float8", "int8"]
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: see `per`."""
    per: Literal["tensor", "channel"] = "channel"
    """Where there are no blocks."""
    scale: str = "weight_scale"
    """Last word of the scales' name."""
    exponents: bool = False
    """Scales are powers of two, stored as exponents in bytes (e8m0)."""
    four_dims: bool = False
    """Scales of blocks are stored as [rows, 1, columns, 1]."""
    symmetric: bool = True
    """Otherwise there is a `weight_zero_point` beside each scale..."""
    zeros_optional: bool = False
    """...or there may be."""
    bits: int = 8
    """Of integers; those of fewer than 8 are stored in bytes too, around zero."""
    inputs: InputRounding | None = None


@dataclass(frozen=True, slots=True)
class Awq:
    """AutoAWQ's "gemm" layout: `qweight` int32 [D, O / 8], nibbles interleaved along O; `qzeros`, `scales`."""

    group: int
    """Columns that share a scale; 0: all."""
    zeros: bool = True


@dataclass(frozen=True, slots=True)
class Gptq:
    """`qweight` int32 [D * bits / 32, O], packed along D; `qzeros` along O; `scales`; `g_idx`."""

    bits: int
    group: int
    symmetric: bool = True
    act_order: bool = False
    """Columns of a group are not neighbours (`desc_act`)."""
    zero_bias: int = 1
    """What is added to stored zero points: 1 in version 1 of the format, 0 in version 2."""


@dataclass(frozen=True, slots=True)
class PackedInts:
    """compressed-tensors "pack-quantized": `weight_packed` int32 [O, D * bits / 32] packed along D, codes offset by half of
    their range; `weight_scale` [O, D / group], `weight_zero_point` packed along O, `weight_g_idx`."""

    bits: int
    group: int
    """0: a whole row; -1: the whole tensor."""
    symmetric: bool = True
    act_order: bool = False
    inputs: InputRounding | None = None


@dataclass(frozen=True, slots=True)
class Four:
    """Floats of 4 bits (e2m1), two in a byte along D, the even column in the low half."""

    scales: Literal["mx", "nv"]
    """mx: an exponent (e8m0) for 32 columns. nv: e4m3 for 16 columns, and a float for the whole tensor..."""
    weight: str = "weight_packed"
    scale: str = "weight_scale"
    tensor_scale: str = ""
    """...of this name..."""
    inverse: bool = False
    """...by which is divided, not multiplied."""
    unused: tuple[str, ...] = ()
    """Other tensors that the checkpoint has and that weight-only arithmetic does not need (scales of inputs)."""


@dataclass(frozen=True, slots=True)
class BitsAndBytes4:
    """bitsandbytes NF4 or FP4: `weight` uint8 [O * D / 2, 1], the first weight in the high half, flattened blocks."""

    kind: Literal["nf4", "bnb_fp4"]


@dataclass(frozen=True, slots=True)
class BitsAndBytes8:
    """bitsandbytes LLM.int8(): `weight` int8 [O, D], `SCB` float32 [O], the largest value of a row."""


@dataclass(frozen=True, slots=True)
class Online:
    """The checkpoint has floats; they are quantised while they are loaded."""

    to: Literal["fp8", "fp8_block", "int8", "int8_weight", "int4", "mxfp4", "mxfp8"]
    group: int = 128
    """Of int4."""


WeightFormat = Eight | Awq | Gptq | PackedInts | Four | BitsAndBytes4 | BitsAndBytes8 | Online
