"""Where experts go: DeepSeek's published example, the best that trying everything finds, and what always holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bough.distributed.balance import balance_experts, balancedness, copies, rank_loads, spread_experts


def test_the_published_example() -> None:
    loads = np.array(
        [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]],
        np.float64,
    )
    slots = spread_experts(loads, num_slots=16, num_groups=4, num_nodes=2, num_ranks=8)
    assert slots.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def best_of_all(load: np.ndarray, num_slots: int, num_ranks: int) -> float:
    """The smallest load of a busiest rank, over all numbers of copies and all ways to pack them."""
    best, per_rank = np.inf, num_slots // num_ranks

    def pack(items: list[float], total: list[float], held: list[int]) -> None:
        nonlocal best
        if max(total) >= best:
            return
        if not items:
            best = max(total)
            return
        tried = set()
        for rank in range(num_ranks):
            if held[rank] < per_rank and (total[rank], held[rank]) not in tried:
                tried.add((total[rank], held[rank]))
                total[rank], held[rank] = total[rank] + items[0], held[rank] + 1
                pack(items[1:], total, held)
                total[rank], held[rank] = total[rank] - items[0], held[rank] - 1

    for more in shares(num_slots - len(load), len(load)):
        items = [each / (1 + extra) for each, extra in zip(load, more, strict=True) for _ in range(1 + extra)]
        pack(sorted(items, reverse=True), [0.0] * num_ranks, [0] * num_ranks)
    return float(best)


def shares(extra: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (extra,)
        return
    for first in range(extra + 1):
        yield from ((first, *rest) for rest in shares(extra - first, parts - 1))


@pytest.mark.parametrize("seed", range(40))
def test_close_to_the_best_of_all(seed: int) -> None:
    """Also where greedy packing misses it by half."""
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.choice([2, 3, 4]))
    num_slots = num_ranks * int(rng.integers(2, 10 // num_ranks + 1))
    num_experts = int(rng.integers(max(2, num_slots - 4), num_slots + 1))
    even, heavy = rng.integers(1, 200, num_experts), 7 * rng.zipf(1.5, num_experts).clip(max=500)
    load = (even if seed % 2 else heavy).astype(np.float64)
    slots = balance_experts(load[None], num_slots, num_ranks)
    assert rank_loads(load[None], slots, num_ranks).max() <= 1.05 * best_of_all(load, num_slots, num_ranks)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from([2, 4, 8]), per_rank=st.integers(1, 6), redundant=st.integers(0, 5), seed=st.integers(0, 999)
)
def test_every_expert_has_a_slot(ranks: int, per_rank: int, redundant: int, seed: int) -> None:
    num_slots = ranks * per_rank
    num_experts = max(1, num_slots - redundant)
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 1000, (3, num_experts)).astype(np.float64)
    held = np.stack([rng.permutation(np.arange(num_slots) % num_experts) for _ in loads])
    slots = balance_experts(loads, num_slots, ranks, held=held)
    assert slots.shape == (3, num_slots)
    assert (copies(slots, num_experts) >= 1).all()
    greedy = spread_experts(loads, num_slots, 1, 1, ranks)
    assert (rank_loads(loads, slots, ranks).max(1) <= rank_loads(loads, greedy, ranks).max(1) * (1 + 1e-9)).all()
    for before, after in zip(held.reshape(3, ranks, -1), slots.reshape(3, ranks, -1), strict=True):
        for old, new in zip(before, after, strict=True):
            kept = sum(min((old == expert).sum(), (new == expert).sum()) for expert in range(num_experts))
            assert (old == new).sum() == kept, "what stays on a rank stays in its slot"


def test_groups_stay_on_their_machine() -> None:
    loads = np.random.default_rng(0).integers(1, 900, (4, 16)).astype(np.float64)
    slots = balance_experts(loads, 24, 8, num_groups=4, num_nodes=2)
    for layer in slots:
        for group in range(4):
            members = np.isin(layer.reshape(2, -1), range(4 * group, 4 * group + 4)).any(1)
            assert members.sum() == 1


def test_balancedness() -> None:
    assert balancedness(np.array([[4.0, 4.0], [4.0, 4.0]])) == 1.0
    assert balancedness(np.array([[8.0, 0.0]])) == 0.5
    assert balancedness(np.array([[8.0, 0.0], [0.0, 0.0]])) == 0.5, "a layer without tokens says nothing"
    assert balancedness(np.zeros((2, 4))) == 1.0
