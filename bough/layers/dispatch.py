"""Between the router and the experts: tokens go to the ranks of their experts, and what those make of them comes back.

Every way gives every rank the sum over each token's experts. With `SumDispatch` each rank computes its experts for all
tokens, and one sum over ranks combines them: nothing is exchanged beforehand. The others bring each expert's result back by
itself and add in float32 in the order of the router's choice, so that the sum does not depend on where experts are.

N tokens of all ranks of a stage, S tokens that this rank combines, M rows that it computes, k experts per token, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.config.concerns import MoeDispatch
from bough.core.errors import ConfigError
from bough.distributed.mesh import Axis, Mesh
from bough.layers.expert_table import ExpertTable

Shared = Callable[[Tensor], Tensor]
"""The shared expert: [T, D] -> [T, D]."""
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""This rank's experts: (x [M, D], weights float32 [M, j], slots of this rank [M, j]) -> weighted sums [M, D]."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A step's tokens, and what the router chose for them."""

    x_TD: Tensor
    """What its experts see of a token..."""
    weights_Tk: Tensor
    """float32"""
    slots_Tk: Tensor
    """int32, over all ranks; -1: none (padding)."""
    plain_TD: Tensor
    """...and what the shared expert sees."""


class Dispatch(Protocol):
    def __call__(self, routed: Routed, compute: Compute, shared: Shared | None) -> Tensor:
        """[T, D]: for each token the sum over its experts, and what the shared expert makes of it, on all ranks."""
        ...


def make_dispatch(kind: MoeDispatch, mesh: Mesh, table: ExpertTable) -> Dispatch:
    if kind == "none":
        return SumDispatch(mesh.tp, table)
    lanes = Lanes(mesh)
    return GatherDispatch(lanes, table) if kind == "allgather" else ExchangeDispatch(lanes, table)


class SumDispatch:
    """Every rank computes its experts for all tokens, and its part of the shared expert; one sum combines them."""

    def __init__(self, axis: Axis, table: ExpertTable) -> None:
        self.axis = axis
        self.first: int = table.mine.start

    def __call__(self, routed: Routed, compute: Compute, shared: Shared | None) -> Tensor:
        slots_Tk = routed.slots_Tk - self.first if self.first else routed.slots_Tk
        out_TD = compute(routed.x_TD, routed.weights_Tk, slots_Tk)
        if shared is not None:
            out_TD = out_TD + shared(routed.plain_TD)
        return self.axis.talk.all_reduce(out_TD)


class Lanes:
    """How the tokens that all ranks of a stage hold are shared out for combining: each group of ranks with the same experts
    (a place on the axis `ep`) combines one part of them. The ranks of a group (the axis `units`) split each expert."""

    def __init__(self, mesh: Mesh) -> None:
        self.ep, self.units = mesh.ep, mesh.units
        if mesh.ep.size == 1:
            raise ConfigError(
                what="there is nowhere to dispatch tokens to",
                why="all experts are on every rank, which --ep-size 1 means",
                fix="add --ep-size, or leave out --moe-a2a-backend",
                param="moe_a2a_backend",
            )

    def padded(self, x: Tensor) -> Tensor:
        """[ep * S, ...]: as many tokens for each group, zeros at the end."""
        short = -len(x) % self.ep.size
        return F.pad(x, (0,) * (2 * x.dim() - 2) + (0, short)) if short else x

    def mine(self, x: Tensor) -> Tensor:
        """This group's part of the tokens, [S, ...]."""
        size = -(-len(x) // self.ep.size)
        return self.padded(x).view(self.ep.size, size, *x.shape[1:])[self.ep.rank]

    def mine_of(self, routed: Routed) -> Routed:
        x_SD = self.mine(routed.x_TD)
        plain_SD = x_SD if routed.plain_TD is routed.x_TD else self.mine(routed.plain_TD)
        return Routed(x_SD, self.mine(routed.weights_Tk), self.mine(routed.slots_Tk), plain_SD)

    def all(self, mine_SD: Tensor, num_tokens: int) -> Tensor:
        """[T, D] on every rank, from each group's part of the tokens."""
        return self.ep.talk.all_gather(mine_SD).flatten(0, 1)[:num_tokens]

    def combine(self, parts_SkD: Tensor, routed: Routed, shared: Shared | None) -> Tensor:
        """[S, D]: what the experts gave, weighted and added in the order of choice in float32, with the shared expert's.
        `routed`: this group's tokens."""
        out_SD = weighted_sum(parts_SkD, routed.weights_Tk)
        if self.units.size > 1:
            out_SD = self.units.talk.all_reduce(out_SD)
        if shared is not None:
            out_SD = out_SD + shared(routed.plain_TD)
        return out_SD.to(routed.x_TD.dtype)


def weighted_sum(parts_SkD: Tensor, weights_Sk: Tensor) -> Tensor:
    """float32 [S, D]: the first choice first."""
    out_SD = parts_SkD[:, 0].float() * weights_Sk[:, :1]
    for choice in range(1, parts_SkD.shape[1]):
        out_SD += parts_SkD[:, choice].float() * weights_Sk[:, choice, None]
    return out_SD


class GatherDispatch:
    """Every rank computes its experts for all tokens, each result by itself; each group gathers those of its part of the
    tokens. No shape depends on what is routed where, so that graphs can hold it."""

    def __init__(self, lanes: Lanes, table: ExpertTable) -> None:
        self.lanes = lanes
        self.first: int = table.mine.start
        self.last: int = table.mine.stop

    def __call__(self, routed: Routed, compute: Compute, shared: Shared | None) -> Tensor:
        lanes, (num_tokens, width), k = self.lanes, routed.x_TD.shape, routed.slots_Tk.shape[1]
        slots_M1 = routed.slots_Tk.reshape(-1, 1)
        here = (slots_M1 >= self.first) & (slots_M1 < self.last)
        slots_M1 = torch.where(here, slots_M1 - self.first, -1)
        rows_MD = routed.x_TD.repeat_interleave(k, 0)
        out_MD = compute(rows_MD, _ones(slots_M1), slots_M1)
        parts = lanes.padded(out_MD.view(num_tokens, k, width)).view(lanes.ep.size, -1, k, width)
        parts_SkD = lanes.ep.talk.reduce_scatter(parts)  # one rank of the axis has each of them, the others zeros
        return lanes.all(lanes.combine(parts_SkD, lanes.mine_of(routed), shared), num_tokens)


class ExchangeDispatch:
    """Each group sends its part of the tokens to the ranks of their experts, a token once to a rank whatever it chose
    there, and gets each expert's result back. Ranks must know how much comes, so that on a GPU the host waits for the
    router: steps that are captured as a graph are dispatched by `GatherDispatch`."""

    def __init__(self, lanes: Lanes, table: ExpertTable) -> None:
        self.lanes = lanes
        self.table = table
        self.captured = GatherDispatch(lanes, table)

    def __call__(self, routed: Routed, compute: Compute, shared: Shared | None) -> Tensor:
        lanes = self.lanes
        if routed.x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.captured(routed, compute, shared)
        num_tokens = len(routed.x_TD)
        begin = lanes.ep.rank * -(-num_tokens // lanes.ep.size)
        mine = lanes.mine_of(routed)
        mine.slots_Tk[max(0, num_tokens - begin) :] = -1  # zeros that pad the tokens
        parts_SkD = self.exchanged(mine, compute)
        return lanes.all(lanes.combine(parts_SkD, mine, shared), num_tokens)

    def exchanged(self, mine: Routed, compute: Compute) -> Tensor:
        """[S, k, D]: what the experts on all ranks make of this rank's tokens; zeros where none was chosen."""
        talk, size, table = self.lanes.ep.talk, self.lanes.ep.size, self.table
        slots_Sk = mine.slots_Tk
        rank_Sk = torch.where(slots_Sk < 0, -1, table.rank_of_P[slots_Sk.clamp(min=0).long()])
        at_RSk = rank_Sk[None] == torch.arange(size, device=rank_Sk.device)[:, None, None]
        to_rank, token = at_RSk.any(2).nonzero(as_tuple=True)  # by rank, then by token
        local_Mk = torch.where(at_RSk[to_rank, token], slots_Sk[token] - table.first_of_R[to_rank, None], -1)
        counts_2R = torch.stack((torch.bincount(to_rank, minlength=size), at_RSk.sum((1, 2))))
        every_R2R = talk.all_gather(counts_2R).tolist()
        place = self.lanes.ep.rank
        send, want = every_R2R[place]
        receive, owed = [each[0][place] for each in every_R2R], [each[1][place] for each in every_R2R]
        rows_MD = talk.all_to_all(mine.x_TD[token], send, receive)
        local_Mk = talk.all_to_all(local_Mk, send, receive)
        row, choice = (local_Mk >= 0).nonzero(as_tuple=True)
        slot_M1 = local_Mk[row, choice][:, None]
        out_MD = compute(rows_MD[row], _ones(slot_M1), slot_M1) if len(row) else rows_MD[:0]
        back_MD = talk.all_to_all(out_MD, owed, want)
        _, token, choice = at_RSk.nonzero(as_tuple=True)  # the order in which results come back
        parts_SkD = mine.x_TD.new_zeros(*slots_Sk.shape, mine.x_TD.shape[1])
        parts_SkD[token, choice] = back_MD
        return parts_SkD


def _ones(slots_M1: Tensor) -> Tensor:
    return torch.ones_like(slots_M1, dtype=torch.float32)
