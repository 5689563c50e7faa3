"""One byte per weight, as it is: FP8 and INT8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.kernels.packed_linear import Codes, Inputs
from bough.kernels.packed_linear.codes import CodeKind
from bough.quantization.formats import Eight, InputRounding
from bough.quantization.layouts.layout import FLOATS, Region, StoredSpan, TensorSpec, WeightLayout

_BYTES = {"float8": frozenset({"F8_E4M3"}), "int8": frozenset({"I8"})}
_EXPONENTS = frozenset({"U8", "F8_E8M0"})


@dataclass(frozen=True, slots=True)
class EightLayout(WeightLayout):
    """`weight`, its scales, and what is known of inputs."""

    form: Eight

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        form = self.form
        specs = {"weight": TensorSpec(shape, StoredSpan(0), StoredSpan(1), _BYTES[form.kind])}
        specs[form.scale] = self._scales(shape, _EXPONENTS if form.exponents else FLOATS)
        if not form.symmetric:
            zeros = self._scales(shape, frozenset({"I8", "I32", "F32"}))
            specs["weight_zero_point"] = TensorSpec(
                zeros.shape, zeros.rows, zeros.cols, zeros.kinds, form.zeros_optional, also=zeros.also
            )
        inputs = form.inputs
        optional = inputs is None or not inputs.static
        for name in ("input_scale", "input_scale_ub"):
            needed = name == "input_scale" and not optional
            specs[name] = TensorSpec((), None, None, FLOATS, not needed, also=((1,), (1, 1)), is_scale=True)
        specs["input_zero_point"] = TensorSpec(
            (),
            None,
            None,
            frozenset({"I8", "I32", "F32"}),
            inputs is None or inputs.symmetric or optional,
            also=((1,),),
        )
        return specs

    def _scales(self, shape: tuple[int, int], kinds: frozenset[str]) -> TensorSpec:
        form, (rows, cols) = self.form, shape
        if form.block is not None:
            down, across = form.block
            count = (-(-rows // down), -(-cols // across))
            if form.four_dims:
                spans = (StoredSpan(0, down), StoredSpan(2, across))
                return TensorSpec((count[0], 1, count[1], 1), *spans, kinds, also=(count,), is_scale=True)
            return TensorSpec(count, StoredSpan(0, down), StoredSpan(1, across), kinds, is_scale=True)
        if form.per == "tensor":
            return TensorSpec((), None, None, kinds, also=((1,), (1, 1)), is_scale=True)
        return TensorSpec((rows, 1), StoredSpan(0), None, kinds, also=((rows,),), is_scale=True)

    def decode(self, region: Region, tensors: Mapping[str, Tensor]) -> Codes:
        form = self.form
        scale = tensors[form.scale]
        scale = exponents_to_float(scale) if form.exponents else scale.float()
        down, across = form.block or (region.num_rows if form.per == "tensor" else 1, region.num_cols)
        scale_OG = scale.reshape(-(-region.num_rows // down), -(-region.num_cols // across))
        weight = tensors["weight"]
        inputs = None if form.inputs is None else inputs_of(form.inputs, tensors)
        if form.kind == "float8":
            return Codes("float8", weight, scale_OG, across, rows=down, inputs=inputs)
        kind: CodeKind = "int4" if form.bits <= 4 else "int8"
        middle = 8 if kind == "int4" else 128
        values = (weight + middle).view(torch.uint8) if kind == "int4" else weight.view(torch.uint8) ^ 128
        stored, zero = tensors.get("weight_zero_point"), None
        if stored is not None and bool((stored != 0).any()):
            zero = (stored.to(torch.int32).reshape(scale_OG.shape) + middle).to(torch.uint8)
        return Codes(kind, values, scale_OG, across, rows=down, zero_OG=zero, inputs=inputs)


def exponents_to_float(stored: Tensor) -> Tensor:
    """e8m0: 2 to the power of (byte - 127), exactly, also 2^-127."""
    exponent = stored.view(torch.uint8).int()
    return torch.where(exponent == 0, 1 << 22, exponent << 23).int().view(torch.float32)


def inputs_of(rounding: InputRounding, tensors: Mapping[str, Tensor]) -> Inputs | None:
    """None for asymmetric ones: kernels round inputs symmetrically, so these are left as they are."""
    if not rounding.symmetric:
        return None
    scale = float(tensors["input_scale"].float().max()) if rounding.static else None
    return Inputs(rounding.kind, rounding.group, scale, power_of_two=rounding.power_of_two)
