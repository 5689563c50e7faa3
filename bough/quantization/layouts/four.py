"""Floats of four bits: MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.kernels.packed_linear import Codes
from bough.quantization.formats import Four
from bough.quantization.layouts.eight import exponents_to_float
from bough.quantization.layouts.layout import FLOATS, Region, StoredSpan, TensorSpec, WeightLayout

_BYTES = frozenset({"U8", "I8"})
_GROUPS = {"mx": 32, "nv": 16}


@dataclass(frozen=True, slots=True)
class FourLayout(WeightLayout):
    """Two columns in a byte, the even one in the low half."""

    form: Four

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        form, (rows, cols) = self.form, shape
        group = _GROUPS[form.scales]
        kinds = frozenset({"U8", "F8_E8M0"}) if form.scales == "mx" else frozenset({"F8_E4M3"})
        specs = {
            form.weight: TensorSpec((rows, cols // 2), StoredSpan(0), StoredSpan(1, 2), _BYTES),
            form.scale: TensorSpec(
                (rows, -(-cols // group)), StoredSpan(0), StoredSpan(1, group), kinds, is_scale=True
            ),
        }
        if form.tensor_scale:
            specs[form.tensor_scale] = TensorSpec((1,), None, None, FLOATS, also=((),), is_scale=True)
        for name in form.unused:
            specs[name] = TensorSpec((1,), None, None, FLOATS, optional=True, also=((),))
        return specs

    def problem(self, shape: tuple[int, int]) -> str:
        return "" if shape[1] % 2 == 0 else f"{shape[1]} inputs are no multiple of 2"

    def decode(self, region: Region, tensors: Mapping[str, Tensor]) -> Codes:
        form = self.form
        packed, stored = tensors[form.weight].view(torch.uint8), tensors[form.scale]
        scale = exponents_to_float(stored) if form.scales == "mx" else stored.float()
        whole = None
        if form.tensor_scale:
            factor = tensors[form.tensor_scale].float().reshape(1)
            whole = (1 / factor if form.inverse else factor).expand(region.num_rows)
        values = unpack_nibbles(packed)
        return Codes("float4", values, scale.bfloat16(), _GROUPS[form.scales], row_scale_O=whole)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., 2 n]: low halves of bytes at even places, high halves at odd ones."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
