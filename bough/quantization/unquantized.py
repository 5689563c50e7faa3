"""Weights as plain tensors in the dtype of the activations. Block formats are dequantised on the way in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from bough.kernels.activation import gelu_tanh_mul, silu_mul
from bough.kernels.linear import linear, linear_after_norm, linear_onto, linear_silu_mul
from bough.quantization.scheme import Activation, Matrix, Part
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into

GATES: Final = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class Unquantized:
    """The scheme."""

    def matrix(self, parts: Sequence[Part], *, dtype: torch.dtype, device: torch.device) -> Matrix:
        return DenseMatrix(parts, dtype, device)


class DenseMatrix(Matrix):
    """One tensor."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.parts = tuple(parts)
        num_rows = sum(part.num_rows for part in parts)
        self.weight = nn.Parameter(
            torch.empty(num_rows, parts[0].num_cols, dtype=dtype, device=device), requires_grad=False
        )

    def weight_slots(self) -> dict[str, Slot]:
        slots, start = {}, 0
        for part in self.parts:
            target = self.weight[start : start + part.num_rows]
            slots[part.slot_name("weight")] = Slot(part.shape, partial(_fill, target, part))
            start += part.num_rows
        return slots

    def forward(self, x_TD: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return linear(x_TD, self.weight, bias_O)

    def some_rows(self, x_TD: Tensor, rows: slice, bias: Tensor | None = None) -> Tensor:
        return linear(x_TD, self.weight[rows], bias)

    def after_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_D: Tensor, eps: float, offset: float, bias_O: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return linear_after_norm(x_TD, residual_TD, norm_D, eps, self.weight, bias_O, offset=offset)

    def onto(self, x_TD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_onto(x_TD, self.weight, stream_TO)

    def gated(self, x_TD: Tensor, activation: Activation, bias_O: Tensor | None = None) -> Tensor:
        if activation == "silu" and bias_O is None:
            return linear_silu_mul(x_TD, self.weight)
        return GATES[activation](linear(x_TD, self.weight, bias_O))

    def lookup(self, ids_T: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids_T, self.weight)


def _fill(target: Tensor, part: Part, stored: Stored) -> None:
    copy_into(target, stored, part.rows, part.cols)
