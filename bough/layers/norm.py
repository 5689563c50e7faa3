"""Norms, alone or together with the addition of the residual stream before them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import NormFacts
from bough.kernels.norm import add_rms_norm, rms_norm
from bough.layers.build import Build
from bough.layers.stream import Product, Unsummed, value_of
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight)."""

    fuses = True

    weight: Tensor

    def __init__(self, dim: int, eps: float, build: Build, *, weight: bool = True, offset: float = 0.0) -> None:
        """Without `weight` it is all ones."""
        super().__init__()
        self.eps = eps
        self.offset = offset
        if weight:
            self.weight = _parameter(dim, build)
        else:
            self.register_buffer("weight", torch.ones(dim, dtype=build.dtype, device=build.device), persistent=False)

    def slots(self) -> dict[str, Slot]:
        if not isinstance(self.weight, nn.Parameter):
            return {}
        return {"weight": Slot(tuple(self.weight.shape), partial(fill, self.weight))}

    def forward(self, x: Tensor | Product) -> Tensor:
        return rms_norm(value_of(x), self.weight, self.eps, offset=self.offset)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), where x may be [P, T, D] of several addends."""
        return add_rms_norm(x_TD, residual_TD, self.weight, self.eps, offset=self.offset)

    def add_summed(self, x: Unsummed, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """As `add`, where x is still to be summed over ranks."""
        if self.weight.dtype != residual_TD.dtype:
            return self.add(x.value(), residual_TD)
        return x.talk.add_norm(x.part_TD, residual_TD, self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * (offset + weight) + bias."""

    fuses = False

    def __init__(
        self, dim: int, eps: float, build: Build, *, weight: bool = True, bias: bool = True, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.shape = (dim,)
        self.weight = _parameter(dim, build) if weight else None
        self.bias = _parameter(dim, build) if bias else None

    def slots(self) -> dict[str, Slot]:
        both = {"weight": self.weight, "bias": self.bias}
        return {name: Slot(tuple(each.shape), partial(fill, each)) for name, each in both.items() if each is not None}

    def forward(self, x: Tensor | Product) -> Tensor:
        weight = self.weight if self.weight is None or not self.offset else self.weight + self.offset
        return F.layer_norm(value_of(x), self.shape, weight, self.bias, self.eps)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), where x may be [P, T, D] of several addends."""
        total_TD = residual_TD + (x_TD if x_TD.dim() == residual_TD.dim() else x_TD.sum(0))
        return self(total_TD), total_TD

    def add_summed(self, x: Unsummed, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """As `add`, where x is still to be summed over ranks."""
        return self.add(x.value(), residual_TD)


def make_norm(facts: NormFacts, dim: int, build: Build) -> RMSNorm | LayerNorm:
    """A norm of vectors of `dim` values."""
    if facts.kind == "layer":
        return LayerNorm(dim, facts.eps, build, weight=facts.weight, bias=facts.bias, offset=facts.offset)
    return RMSNorm(dim, facts.eps, build, weight=facts.weight, offset=facts.offset)


def _parameter(dim: int, build: Build) -> nn.Parameter:
    return nn.Parameter(torch.empty(dim, dtype=build.dtype, device=build.device), requires_grad=False)


def fill(target: Tensor, stored: Stored) -> None:
    """Fills a parameter with a whole tensor of the checkpoint."""
    copy_into(target, stored)
