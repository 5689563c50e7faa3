"""bitsandbytes' tensors, under the names that `read_names` gives them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.core.errors import WeightsError
from bough.kernels.packed_linear import Codes
from bough.kernels.packed_linear.codes import TABLES
from bough.quantization.formats import BitsAndBytes4, BitsAndBytes8
from bough.quantization.layouts.layout import Region, StoredSpan, TensorSpec, WeightLayout

_BLOCK = 64
"""Weights that share a scale, unless the quantisation state says otherwise."""
_NESTED_BLOCK = 256


@dataclass(frozen=True, slots=True)
class BitsAndBytes4Layout(WeightLayout):
    """The weight is one long row of blocks, two weights in a byte, the first in the high half."""

    form: BitsAndBytes4
    block: int = _BLOCK
    nested: bool = False
    """The blocks' scales are themselves quantised."""
    state_bytes: int = 0
    """Length of the quantisation state, JSON in bytes."""

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        count = shape[0] * shape[1]
        blocks = -(-count // self.block)
        floats, whole = frozenset({"F32"}), (None, None)
        specs = {
            "weight": TensorSpec((count // 2, 1), StoredSpan(0, 1, shape[1] // 2), None, frozenset({"U8"})),
            "weight_absmax": TensorSpec(
                (blocks,), *whole, frozenset({"U8"}) if self.nested else floats, is_scale=not self.nested
            ),
            "weight_quant_map": TensorSpec((16,), *whole, floats),
            "weight_quant_state": TensorSpec((self.state_bytes,), *whole, frozenset({"U8"})),
        }
        if self.nested:
            specs["weight_nested_absmax"] = TensorSpec((-(-blocks // _NESTED_BLOCK),), *whole, floats, is_scale=True)
            specs["weight_nested_quant_map"] = TensorSpec((256,), *whole, floats)
        return specs

    @property
    def cuts_columns(self) -> bool:
        return False

    def problem(self, shape: tuple[int, int]) -> str:
        return "" if shape[1] % 2 == 0 else f"{shape[1]} inputs are no multiple of 2"

    def decode(self, region: Region, tensors: Mapping[str, Tensor]) -> Codes:
        state = json.loads(bytes(tensors["weight_quant_state"].cpu().tolist()))
        table = torch.tensor(TABLES[self.form.kind], device=tensors["weight"].device)
        if not torch.allclose(tensors["weight_quant_map"], table, atol=1e-6):
            raise WeightsError(
                what=f"a bitsandbytes weight has another table of values than {self.form.kind} has",
                fix="use a checkpoint that bitsandbytes wrote",
            )
        absmax = tensors["weight_absmax"]
        if self.nested:
            nested = tensors["weight_nested_absmax"].repeat_interleave(
                int(state.get("nested_blocksize", _NESTED_BLOCK))
            )
            absmax = tensors["weight_nested_quant_map"][absmax.int()] * nested[: absmax.numel()]
            absmax = absmax + float(state.get("nested_offset", 0.0))
        packed = tensors["weight"].view(region.num_rows, -1)
        values = torch.stack((packed >> 4, packed & 15), -1).flatten(-2)
        num_cols = region.shape[1]
        group = math.gcd(num_cols, self.block)
        rows = torch.arange(*region.rows, device=values.device)[:, None]
        at = (rows * num_cols + torch.arange(0, num_cols, group, device=values.device)) // self.block
        return Codes(self.form.kind, values, absmax[at], group)


@dataclass(frozen=True, slots=True)
class BitsAndBytes8Layout(WeightLayout):
    """A byte per weight; `SCB` is the largest value of a row."""

    form: BitsAndBytes8

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec(shape, StoredSpan(0), StoredSpan(1), frozenset({"I8"})),
            "SCB": TensorSpec((shape[0],), StoredSpan(0), None, frozenset({"F32"}), is_scale=True),
            "weight_format": TensorSpec((), None, None, frozenset({"U8"}), optional=True),
        }

    def decode(self, region: Region, tensors: Mapping[str, Tensor]) -> Codes:
        values = tensors["weight"].view(torch.uint8) ^ 128
        return Codes("int8", values, (tensors["SCB"] / 127)[:, None], region.num_cols)
