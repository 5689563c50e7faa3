"""Which expert goes where: copies for experts with much work, and an even load for every rank (EPLB).

Pure arithmetic on counts of tokens. `spread_experts` is DeepSeek's algorithm (greedy, hierarchical over machines);
`balance_experts` improves its result by exchanges, since greedy packing alone misses the best load by 10 % and more where
few experts share a rank.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations_with_replacement
from typing import Final

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]
"""[layers, experts]: tokens that chose each expert."""
Slots = npt.NDArray[np.int64]
"""[layers, slots]: the expert in each slot. Ranks hold equal runs of slots."""

_MOST_EXCHANGES: Final = 256
"""Exchanges per layer, at most: a layer of 288 slots takes some 30 of them."""
_MOST_WAYS: Final = 200
"""Ways of giving copies to experts that are all tried."""
_GAIN: Final = 1e-9
"""Part of a load by which an exchange must be better, so that rounding makes no circles."""


def spread_experts(loads: Loads, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> Slots:
    """Experts for `num_slots` slots on `num_ranks` ranks of `num_nodes` machines.

    Groups of experts (neighbours by number) stay on one machine if their number is a multiple of the machines'.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_experts = loads.shape
    groups_per_node, group_size = num_groups // num_nodes, num_experts // num_groups
    experts_per_node = num_experts // num_nodes
    by_group = loads.reshape(num_layers, num_groups, group_size).sum(-1)
    node, place = pack_evenly(by_group, num_nodes)
    first = (node * groups_per_node + place) * group_size  # of each group, in the order of machines
    moved = (first[:, :, None] + np.arange(group_size)).reshape(num_layers, num_experts)
    expert_at = _inverse(moved)
    by_node = np.take_along_axis(loads, expert_at, 1).reshape(-1, experts_per_node)
    copied, counts = add_copies(by_node, num_slots // num_nodes)
    per_slot = np.take_along_axis(by_node / counts, copied, 1)
    rank, place = pack_evenly(per_slot, num_ranks // num_nodes)
    slot_at = _inverse(rank * (num_slots // num_ranks) + place)
    in_order = np.take_along_axis(copied, slot_at, 1).reshape(num_layers, num_nodes, -1)
    in_order = in_order + np.arange(0, num_experts, experts_per_node)[None, :, None]
    return np.take_along_axis(expert_at, in_order.reshape(num_layers, num_slots), 1)


def pack_evenly(weights: npt.NDArray[np.float64], num_packs: int) -> tuple[Slots, Slots]:
    """(pack of each item, its place there): equally many items in each pack, the heaviest first, each into the lightest
    pack that has room."""
    num_rows, num_items = weights.shape
    room = num_items // num_packs
    if room == 1:
        return np.tile(np.arange(num_items), (num_rows, 1)), np.zeros((num_rows, num_items), np.int64)
    pack_of, place_of = np.zeros((2, num_rows, num_items), np.int64)
    for row, order in enumerate(np.argsort(-weights, axis=1, kind="stable")):
        total, held = np.zeros(num_packs), np.zeros(num_packs, np.int64)
        for item in order:
            pack = int(np.argmin(np.where(held < room, total, np.inf)))
            pack_of[row, item], place_of[row, item] = pack, held[pack]
            total[pack] += weights[row, item]
            held[pack] += 1
    return pack_of, place_of


def add_copies(loads: Loads, num_slots: int) -> tuple[Slots, Slots]:
    """(expert of each slot [layers, slots], copies of each expert): every expert once, and one more copy, again and again,
    of the expert whose copies have most to do."""
    num_rows, num_experts = loads.shape
    experts = np.tile(np.arange(num_slots), (num_rows, 1))
    counts = np.ones((num_rows, num_experts), np.int64)
    rows = np.arange(num_rows)
    for slot in range(num_experts, num_slots):
        busiest = (loads / counts).argmax(1)
        experts[:, slot] = busiest
        counts[rows, busiest] += 1
    return experts, counts


def balance_experts(
    loads: Loads, num_slots: int, num_ranks: int, *, num_groups: int = 1, num_nodes: int = 1, held: Slots | None = None
) -> Slots:
    """As `spread_experts`, and then exchanged until no exchange of two slots, and no copy more of one expert and less of
    another, lowers the load of the busiest rank. Exchanges stay within a machine where groups of experts do.

    `held`: the slots as they are; experts that stay on their rank stay in their slot.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    slots = spread_experts(loads, num_slots, num_groups, num_nodes, num_ranks)
    per_node, ranks_per_node = num_slots // num_nodes, num_ranks // num_nodes
    for load, layer in zip(loads, slots, strict=True):
        for node in range(num_nodes):
            part = layer[node * per_node : (node + 1) * per_node]
            part[:] = _exchanged(load, part, ranks_per_node)
    if held is not None:
        for before, after in zip(held, slots, strict=True):
            after[:] = _kept_in_place(before, after, num_ranks)
    return slots


def rank_loads(loads: Loads, slots: Slots, num_ranks: int) -> npt.NDArray[np.float64]:
    """[layers, ranks]: tokens that each rank computes, if the copies of an expert share its tokens evenly."""
    counts = copies(slots, loads.shape[1])
    per_slot = np.take_along_axis(loads / np.maximum(counts, 1), slots, 1)
    per_rank: npt.NDArray[np.float64] = per_slot.reshape(len(slots), num_ranks, -1).sum(-1)
    return per_rank


def copies(slots: Slots, num_experts: int) -> Slots:
    """[layers, experts]: how often each expert is held."""
    return np.stack([np.bincount(layer, minlength=num_experts) for layer in slots])


def balancedness(per_rank: npt.NDArray[np.float64]) -> float:
    """The mean over layers of mean / largest load of a rank: 1 is even, 1 / ranks is all on one. 1 without any tokens."""
    busiest = per_rank.max(1)
    used = busiest > 0
    return float((per_rank.mean(1)[used] / busiest[used]).mean()) if used.any() else 1.0


def _exchanged(load: npt.NDArray[np.float64], slots: npt.NDArray[np.int64], num_ranks: int) -> npt.NDArray[np.int64]:
    """The slots of one layer on one machine's ranks, improved. Where experts and copies are few, exchanges get stuck: all
    numbers of copies are tried there."""
    best = _Exchange(load, slots, num_ranks).improve()
    experts = np.unique(slots)
    extra = len(slots) - len(experts)
    if 0 < math.comb(extra + len(experts) - 1, extra) <= _MOST_WAYS:
        for more in combinations_with_replacement(experts.tolist(), extra):
            copied = np.concatenate([experts, np.array(more, np.int64)])
            counts = np.bincount(copied, minlength=len(load))
            rank, place = pack_evenly((load[copied] / counts[copied])[None], num_ranks)
            tried = np.empty_like(slots)
            tried[rank[0] * (len(slots) // num_ranks) + place[0]] = copied
            found = _Exchange(load, tried, num_ranks).improve()
            if found.busiest < best.busiest * (1 - _GAIN):
                best = found
    return best.slots


class _Exchange:
    """Improves one layer's slots on the ranks of one machine."""

    def __init__(self, load: npt.NDArray[np.float64], slots: npt.NDArray[np.int64], num_ranks: int) -> None:
        self.load = load.astype(np.float64)
        self.slots = slots.copy()
        self.num_ranks = num_ranks
        self.per_rank = len(slots) // num_ranks
        self.counts = np.bincount(slots, minlength=len(load))

    @property
    def busiest(self) -> float:
        """The load of the busiest rank."""
        return float(self._loads().max())

    def improve(self) -> _Exchange:
        for _ in range(_MOST_EXCHANGES):
            if not self._swap() and not self._recopy():
                break
        return self

    def _loads(self) -> npt.NDArray[np.float64]:
        """[ranks]"""
        loads: npt.NDArray[np.float64] = self._by_slot().sum(1)
        return loads

    def _by_slot(self) -> npt.NDArray[np.float64]:
        """[ranks, slots of a rank]"""
        per_slot: npt.NDArray[np.float64] = self.load[self.slots] / self.counts[self.slots]
        return per_slot.reshape(self.num_ranks, self.per_rank)

    def _swap(self) -> bool:
        """The best exchange of a slot of the busiest rank with one of another rank. False: none is of use."""
        per_slot = self._by_slot()
        total = per_slot.sum(1)
        busiest = int(total.argmax())
        given = per_slot[busiest][:, None, None] - per_slot[None]  # [mine, rank, theirs]: what leaves the busiest
        after = np.maximum(total[busiest] - given, total[None, :, None] + given)
        after[:, busiest] = np.inf
        best = int(after.argmin())
        if after.flat[best] >= total[busiest] * (1 - _GAIN):
            return False
        mine, other, theirs = np.unravel_index(best, after.shape)
        a, b = busiest * self.per_rank + int(mine), int(other) * self.per_rank + int(theirs)
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]
        return True

    def _recopy(self) -> bool:
        """One copy less of an expert that has several, one more of another, wherever that is best. False: none is of use."""
        num_experts, ranks = len(self.load), np.arange(self.num_ranks)
        rank_of = np.repeat(ranks, self.per_rank)
        held = np.zeros((num_experts, self.num_ranks))
        np.add.at(held, (self.slots, rank_of), 1)
        total = (held * (self.load / np.maximum(self.counts, 1))[:, None]).sum(0)
        # What each rank has less if an expert gets one copy more, before the copy itself: [experts, ranks].
        shared = self.load / (self.counts + 1)
        relief = held * (self.load / np.maximum(self.counts, 1) - shared)[:, None]
        worst, chosen = total.max() * (1 - _GAIN), None
        for slot in np.flatnonzero(self.counts[self.slots] > 1):
            given = int(self.slots[slot])
            alone = self.load[given] / (self.counts[given] - 1)
            left = total + held[given] * (alone - self.load[given] / self.counts[given])
            left[rank_of[slot]] -= alone
            after = left[None] - relief
            after[:, rank_of[slot]] += shared
            after[self.counts == 0] = np.inf  # experts of other machines
            after[given] = np.inf
            busiest = after.max(1)
            taken = int(busiest.argmin())
            if busiest[taken] < worst:
                worst, chosen = busiest[taken], (int(slot), given, taken)
        if chosen is None:
            return False
        at, given, taken = chosen
        self.slots[at] = taken
        self.counts[given] -= 1
        self.counts[taken] += 1
        return True


def _kept_in_place(
    before: npt.NDArray[np.int64], after: npt.NDArray[np.int64], num_ranks: int
) -> npt.NDArray[np.int64]:
    """`after` with each rank's slots reordered, so that experts that it has already stay where they are."""
    kept = after.reshape(num_ranks, -1).copy()
    for old, new in zip(before.reshape(num_ranks, -1), kept, strict=True):
        left = Counter(new.tolist())
        placed = []
        for expert in old.tolist():
            placed.append(expert if left[expert] else -1)
            left[expert] -= left[expert] > 0
        arriving = list(left.elements())
        new[:] = [arriving.pop() if expert < 0 else expert for expert in placed]
    return kept.reshape(-1)


def _inverse(order: Slots) -> Slots:
    """Of a permutation in every row."""
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), 1)
    return found
