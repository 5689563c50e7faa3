"""Norms of queries and keys that are not those of each head by the same weights. T tokens, N heads, H width of a head."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import HeadNorms, NormFacts
from bough.layers.build import Build
from bough.layers.norm import LayerNorm, RMSNorm, make_norm
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into


class HeadRows(NamedTuple):
    """Which of the model's heads (of queries, or of keys) a rank norms."""

    num_heads: int
    """In the whole model."""
    mine: slice
    width: int
    """Of a head."""
    holders: int = 1
    """How many ranks hold the same ones."""


class AllHeadsNorm(nn.Module):
    """The root mean square of all heads together, also of those that other ranks hold."""

    def __init__(self, facts: NormFacts, heads: HeadRows, build: Build) -> None:
        super().__init__()
        self.eps, self.offset = facts.eps, facts.offset
        self.axis = build.mesh.heads
        self.holders = heads.holders
        self.rows = slice(heads.mine.start * heads.width, heads.mine.stop * heads.width)
        count = self.rows.stop - self.rows.start
        self.weight = nn.Parameter(torch.empty(count, dtype=build.dtype, device=build.device), requires_grad=False)
        self.width = heads.num_heads * heads.width

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot((self.width,), partial(_fill_rows, self.weight, self.rows))}

    def forward(self, x_TNH: Tensor) -> Tensor:
        x_TW = x_TNH.flatten(1).float()
        squares_T1 = x_TW.square().sum(-1, keepdim=True)
        if self.axis.size > 1:
            squares_T1 = self.axis.talk.all_reduce(squares_T1 / self.holders)
        x_TW = x_TW * torch.rsqrt(squares_T1 / self.width + self.eps) * (self.weight.float() + self.offset)
        return x_TW.to(x_TNH.dtype).view(x_TNH.shape)


class EachHeadNorm(nn.Module):
    """A layer norm or an RMS norm of each head, by weights of its own."""

    def __init__(self, facts: NormFacts, heads: HeadRows, build: Build) -> None:
        super().__init__()
        self.facts = facts
        self.heads = heads.mine
        self.shape = (heads.num_heads, heads.width)
        mine = (heads.mine.stop - heads.mine.start, heads.width)
        self.weight = nn.Parameter(torch.empty(mine, dtype=build.dtype, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        """All heads' weights in one tensor, or in one tensor a head."""
        whole = {"weight": Slot(self.shape, partial(_fill_rows, self.weight, self.heads), optional=True)}
        lone = {
            f"{head}.weight": Slot(self.shape[1:], partial(self._fill_head, head), optional=True)
            for head in range(self.shape[0])
        }
        return {**whole, **lone}

    def _fill_head(self, head: int, stored: Stored) -> None:
        if self.heads.start <= head < self.heads.stop:
            copy_into(self.weight[head - self.heads.start], stored)

    def forward(self, x_TNH: Tensor) -> Tensor:
        x = x_TNH.float()
        if self.facts.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.facts.eps)
        return (x * (self.weight.float() + self.facts.offset)).to(x_TNH.dtype)


class PlainHeadNorm(nn.Module):
    """The root mean square of each head, without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x_TNH: Tensor) -> Tensor:
        return F.rms_norm(x_TNH.float(), x_TNH.shape[-1:], eps=self.eps).to(x_TNH.dtype)


HeadNorm = RMSNorm | LayerNorm | AllHeadsNorm | EachHeadNorm | PlainHeadNorm


def make_head_norm(facts: HeadNorms, heads: HeadRows, build: Build) -> HeadNorm:
    """The norm of queries, or of keys."""
    if not facts.norm.weight:
        return PlainHeadNorm(facts.norm.eps)
    match facts.over:
        case "head":
            return make_norm(facts.norm, heads.width, build)
        case "each head":
            return EachHeadNorm(facts.norm, heads, build)
        case "all heads":
            return AllHeadsNorm(facts.norm, heads, build)


def _fill_rows(target: Tensor, rows: slice, stored: Stored) -> None:
    copy_into(target, stored, rows)
