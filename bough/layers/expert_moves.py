"""Moves experts between slots, and between the ranks that hold them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.layers.expert_table import ExpertTable
from bough.layers.moe import Experts


@dataclass(slots=True)
class Moves:
    """What one rank does to get from some slots to others. Numbers are of its own slots, in the order of ranks."""

    copied: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): experts that the rank has already, in another slot."""
    sent: list[list[int]] = field(default_factory=list)
    """Slots whose experts each rank gets..."""
    received: list[list[int]] = field(default_factory=list)
    """...and slots that take what comes from each rank."""
    exchanged: int = 0
    """Experts that go from one rank to another, over all ranks."""


def plan_moves(table: ExpertTable, slots: npt.NDArray[np.int64]) -> Moves:
    """How this rank's slots come to hold what `slots` says. All ranks of the axis plan with the same numbers."""
    size, me = table.axis.size, table.axis.rank
    moves = Moves(sent=[[] for _ in range(size)], received=[[] for _ in range(size)])
    holders: dict[int, list[int]] = defaultdict(list)
    for slot, expert in enumerate(table.slots.tolist()):
        holders[expert].append(slot)
    asked: dict[int, int] = defaultdict(int)
    first = table.mine.start
    for slot, expert in enumerate(slots.tolist()):
        to = table.ranks[slot]
        if table.slots[slot] == expert:
            continue
        near = [each for each in holders[expert] if table.ranks[each] == to]
        if near:
            if to == me:
                moves.copied.append((near[0] - first, slot - first))
            continue
        source = holders[expert][asked[expert] % len(holders[expert])]  # copies take turns
        asked[expert] += 1
        moves.exchanged += 1
        if table.ranks[source] == me:
            moves.sent[to].append(source - first)
        if to == me:
            moves.received[table.ranks[source]].append(slot - first)
    return moves


@torch.no_grad()
def move_experts(experts: Experts, slots: npt.NDArray[np.int64]) -> int:
    """From now on the layer's slots hold these experts: moves all tensors of each. All ranks of the axis `ep` call it at the
    same point between two steps. Returns how many experts went from one rank to another."""
    table = experts.table
    moves = plan_moves(table, slots)
    by_slot = experts.stack.expert_tensors()
    for number in range(len(by_slot[0])):
        tensors = [each[number] for each in by_slot]
        kept = [(tensors[to], tensors[source].clone()) for source, to in moves.copied]
        if moves.exchanged:
            kept += _exchange(tensors, moves, table)
        for target, value in kept:  # all sources have been read
            target.copy_(value)
    table.assign(slots)
    return moves.exchanged


def _exchange(tensors: list[Tensor], moves: Moves, table: ExpertTable) -> list[tuple[Tensor, Tensor]]:
    """What comes from other ranks, and where it goes."""
    like = tensors[0]
    width = like.numel() * like.element_size()
    rows = [tensors[slot].contiguous().view(-1).view(torch.uint8) for each in moves.sent for slot in each]
    sent = torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.uint8, device=like.device)
    came = table.axis.talk.all_to_all(sent, [len(each) for each in moves.sent], [len(each) for each in moves.received])
    targets = [tensors[slot] for each in moves.received for slot in each]
    return [(to, row.view(like.dtype).view(like.shape)) for to, row in zip(targets, came, strict=True)]
