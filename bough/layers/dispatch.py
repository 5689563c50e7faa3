"""Between the router and the experts: tokens go to the ranks of their experts, and what those make of them comes back.

Every way gives every rank the sum over each token's experts. With `SumDispatch` each rank computes its experts for all
tokens, and one sum over ranks combines them: nothing is exchanged beforehand. The others bring each expert's result back by
itself and add in float32 in the order of the router's choice, so that the sum does not depend on where experts are.

T tokens of this rank, N tokens of all ranks of a stage, S tokens that this rank combines, M rows that it computes, k experts
per token, D width.
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
from bough.layers.spread import TokenSpread

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


def make_dispatch(kind: MoeDispatch, mesh: Mesh, table: ExpertTable, spread: TokenSpread | None) -> Dispatch:
    if kind == "none":
        return SumDispatch(mesh.tp, table, spread)
    lanes = Lanes(mesh, spread)
    return GatherDispatch(lanes, table) if kind == "allgather" else ExchangeDispatch(lanes, table)


def gathered(routed: Routed, spread: TokenSpread | None) -> Routed:
    """The tokens of all ranks of the stage; what pads them has chosen nothing."""
    if spread is None:
        return routed
    k = routed.slots_Tk.shape[1]
    chosen_T2k = torch.cat((routed.weights_Tk, routed.slots_Tk.float() + 1), 1)  # whole numbers below 2^24
    weights_Nk, slots_Nk = spread.gather(chosen_T2k).split_with_sizes((k, k), 1)
    x_ND = spread.gather(routed.x_TD)
    plain_ND = x_ND if routed.plain_TD is routed.x_TD else spread.gather(routed.plain_TD)
    return Routed(x_ND, weights_Nk, (slots_Nk - 1).int(), plain_ND)


class SumDispatch:
    """Every rank computes its experts for all tokens, and its part of the shared expert; one sum combines them."""

    def __init__(self, axis: Axis, table: ExpertTable, spread: TokenSpread | None) -> None:
        self.axis = axis
        self.first: int = table.mine.start
        self.spread = spread

    def __call__(self, routed: Routed, compute: Compute, shared: Shared | None) -> Tensor:
        every = gathered(routed, self.spread)
        slots_Nk = every.slots_Tk - self.first if self.first else every.slots_Tk
        out_ND = compute(every.x_TD, every.weights_Tk, slots_Nk)
        if shared is not None:
            out_ND = out_ND + shared(every.plain_TD)
        if self.spread is not None:
            return self.spread.reduce(out_ND, len(routed.x_TD))
        return self.axis.talk.all_reduce(out_ND)


class Lanes:
    """How tokens are shared out for combining: of those that a group of ranks holds alike, each lane combines an equal part.
    The ranks of a lane (the axis `units`) split each expert, and there are as many lanes as places on the axis `ep`."""

    def __init__(self, mesh: Mesh, spread: TokenSpread | None) -> None:
        self.ep, self.units, self.tp, self.spread = mesh.ep, mesh.units, mesh.tp, spread
        if mesh.ep.size == 1:
            raise ConfigError(
                what="there is nowhere to dispatch tokens to",
                why="all experts are on every rank, which --ep-size 1 means",
                fix="add --ep-size, or leave out --moe-a2a-backend",
                param="moe_a2a_backend",
            )
        if spread is not None and mesh.heads.size % mesh.units.size:
            raise ConfigError(
                what=f"tokens of {mesh.tokens.size} replicas can't be dispatched to {mesh.ep.size} groups of experts",
                why="ranks that split an expert would hold different tokens",
                fix=f"choose an --ep-size that is a multiple of {mesh.tokens.size}, or --moe-a2a-backend none",
                param="ep_size",
            )

    @property
    def sharers(self) -> Axis:
        """Ranks that hold the same tokens."""
        return self.tp if self.spread is None else self.spread.sharers

    @property
    def count(self) -> int:
        """Lanes that share out the same tokens."""
        return self.sharers.size // self.units.size

    def shared_out(self, x: Tensor, rows: int, value: int = 0) -> Tensor:
        """[..., rows, *rest] as [..., lanes, S, *rest], where `rest` are the last two dimensions; `value` fills the end."""
        size = -(-rows // self.count)
        short = size * self.count - rows
        if short:
            x = (
                F.pad(x, (0, 0, 0, short), value=value)
                if x.dim() == 2
                else F.pad(x, (0, 0, 0, 0, 0, short), value=value)
            )
        return x.view(self.count, size, *x.shape[1:])

    def mine(self, x_T: Tensor, value: int = 0) -> Tensor:
        """This lane's part of the tokens, [S, ...]."""
        rows = len(x_T) if self.spread is None else self.spread.rows
        short = rows - len(x_T)
        padded = F.pad(x_T, (0, 0, 0, short), value=value) if short else x_T
        return self.shared_out(padded, rows, value)[self.sharers.rank // self.units.size]

    def mine_of(self, routed: Routed) -> Routed:
        x_SD = self.mine(routed.x_TD)
        plain_SD = x_SD if routed.plain_TD is routed.x_TD else self.mine(routed.plain_TD)
        return Routed(x_SD, self.mine(routed.weights_Tk), self.mine(routed.slots_Tk, -1), plain_SD)

    def all(self, mine_SD: Tensor, num_tokens: int) -> Tensor:
        """[T, D] on every rank that holds these tokens, from each lane's part of them."""
        if self.spread is None:
            return self.ep.talk.all_gather(mine_SD).flatten(0, 1)[:num_tokens]
        every = self.sharers.talk.all_gather(mine_SD)[:: self.units.size]
        return self.spread.done(every.flatten(0, 1)[:num_tokens])

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
    """Every rank computes its experts for all tokens, each result by itself; each lane gathers those of its part of the
    tokens. No shape depends on what is routed where, so that graphs can hold it."""

    def __init__(self, lanes: Lanes, table: ExpertTable) -> None:
        self.lanes = lanes
        self.first: int = table.mine.start
        self.last: int = table.mine.stop

    def __call__(self, routed: Routed, compute: Compute, shared: Shared | None) -> Tensor:
        lanes, k = self.lanes, routed.slots_Tk.shape[1]
        every = gathered(routed, lanes.spread)
        slots_M1 = every.slots_Tk.reshape(-1, 1)
        here = (slots_M1 >= self.first) & (slots_M1 < self.last)
        slots_M1 = torch.where(here, slots_M1 - self.first, -1)
        out_MD = compute(every.x_TD.repeat_interleave(k, 0), _ones(slots_M1), slots_M1)
        rows = len(every.x_TD) if lanes.spread is None else lanes.spread.rows
        by_owner = out_MD.view(-1, rows, k, out_MD.shape[1])
        parts = torch.stack([lanes.shared_out(each, rows) for each in by_owner]).flatten(0, 1)
        parts_SkD = lanes.ep.talk.reduce_scatter(parts)  # one rank of the axis has each of them, the others zeros
        return lanes.all(lanes.combine(parts_SkD, lanes.mine_of(routed), shared), len(routed.x_TD))


class ExchangeDispatch:
    """Each lane sends its part of the tokens to the ranks of their experts, a token once to a rank whatever it chose
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
        if lanes.spread is not None:
            lanes.spread.within = True
        mine = lanes.mine_of(routed)
        parts_SkD = self.exchanged(mine, compute)
        return lanes.all(lanes.combine(parts_SkD, mine, shared), len(routed.x_TD))

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
