"""Layer norms with a bias, as encoders of BERT's kind have them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.layers.build import Build
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias."""

    def __init__(self, dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=build.dtype, device=build.device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dim, dtype=build.dtype, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {
            name: Slot(tuple(each.shape), partial(fill, each))
            for name, each in (("weight", self.weight), ("bias", self.bias))
        }

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.layer_norm(x_TD, self.weight.shape, self.weight, self.bias, self.eps)


class Table(nn.Module):
    """Learned vectors by number: positions, segments. Every rank holds all of them."""

    def __init__(self, rows: int, dim: int, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, dtype=build.dtype, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(tuple(self.weight.shape), partial(fill, self.weight))}

    def forward(self, at_T: Tensor) -> Tensor:
        return F.embedding(at_T, self.weight)


def fill(target: Tensor, stored: Stored) -> None:
    """Fills a parameter with a whole tensor of the checkpoint."""
    copy_into(target, stored)
