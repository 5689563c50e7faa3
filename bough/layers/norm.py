"""Root-mean-square norms, alone or together with the addition of the residual stream before them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bough.kernels.norm import add_rms_norm, rms_norm
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight)."""

    def __init__(self, dim: int, eps: float, build: Build, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(dim, dtype=build.dtype, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(tuple(self.weight.shape), partial(_fill, self.weight))}

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps, offset=self.offset)

    def add(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), where x may be [P, T, D] of several addends. The stream starts with None."""
        if residual_TD is None:
            return self.forward(x_TD), x_TD
        return add_rms_norm(x_TD, residual_TD, self.weight, self.eps, offset=self.offset)

    def last(self, x_TD: Tensor, residual_TD: Tensor | None, batch: Batch) -> Tensor:
        """The norm at a model's end, for the rows whose logits are wanted only (the last block may have left out others)."""
        if batch.logits_at is not None and x_TD.shape[-2] == batch.ids_T.shape[0]:
            x_TD = x_TD.index_select(-2, batch.logits_at)
            residual_TD = None if residual_TD is None else residual_TD.index_select(0, batch.logits_at)
        return self.add(x_TD, residual_TD)[0]


def _fill(target: Tensor, stored: Stored) -> None:
    copy_into(target, stored)
