"""A matrix of packed pieces, whatever their formats are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.config.model_facts import Activation
from bough.kernels.linear import linear
from bough.kernels.packed_linear import PackedWeight, packed_linear, packed_rows
from bough.kernels.rows import take_rows
from bough.quantization.scheme import Matrix, Part
from bough.quantization.unquantized import GATES


class PackedMatrix(Matrix):
    """Pieces from top to bottom, each packed or plain. They are there once loading has finished."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device, *, exact: bool = False) -> None:
        """`exact`: activations are not rounded to 8 bits, where a kernel would."""
        super().__init__()
        self.parts = tuple(parts)
        self.dtype = dtype
        self.device = device
        self.exact = exact
        self.pieces: list[PackedWeight | Tensor] = []

    def forward(self, x_TD: Tensor, bias_O: Tensor | None = None) -> Tensor:
        if len(self.pieces) == 1:
            return self._multiply(x_TD, self.pieces[0], bias_O, None)
        out_TO = x_TD.new_empty(x_TD.shape[0], sum(piece.shape[0] for piece in self.pieces))
        start = 0
        for piece in self.pieces:
            rows = slice(start, start + piece.shape[0])
            self._multiply(x_TD, piece, None if bias_O is None else bias_O[rows], out_TO[:, rows])
            start = rows.stop
        return out_TO

    def _multiply(
        self, x_TD: Tensor, piece: PackedWeight | Tensor, bias_O: Tensor | None, out: Tensor | None
    ) -> Tensor:
        if isinstance(piece, PackedWeight):
            return packed_linear(x_TD, piece, bias_O, exact=self.exact, out=out)
        result = linear(x_TD, piece, bias_O)
        return result if out is None else out.copy_(result)

    def gated(self, x_TD: Tensor, activation: Activation, bias_O: Tensor | None = None) -> Tensor:
        return GATES[activation](self(x_TD, bias_O))

    def lookup(self, ids_T: Tensor) -> Tensor:
        (piece,) = self.pieces
        if isinstance(piece, PackedWeight):
            return packed_rows(ids_T, piece, self.dtype)
        return take_rows(ids_T, piece)[0]
