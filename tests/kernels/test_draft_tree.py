"""Trees of drafts against a walk in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from random_trees import TreeStepCase, path_to, tree_step

from bough.kernels.draft_tree import gather_path, start_tree, walk_tree

CPU = torch.device("cpu")


def walked(case: TreeStepCase, row: int, first: int, *, blocks: bool) -> list[int]:
    """The nodes behind which the row's tokens were drawn."""
    nodes: list[int] = []
    node: int | None = 0
    while node is not None and not (blocks and case.blocked[first + node]):
        nodes.append(node)
        drawn = int(case.drawn[first + node])
        children = [n for n, parent in enumerate(case.parents[row], 1) if parent == node]
        node = next((n for n in children if case.ids[row][n] == drawn), None)
    return nodes


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_path_is_found_and_put_together(page_size: int, blocks: bool) -> None:
    rng = random.Random(page_size)
    for _ in range(20):
        width, num_rows = rng.randrange(2, 7), rng.randrange(1, 7)
        case = tree_step(rng, num_rows, 12, width, page_size)
        state, inputs, caches = case.made(CPU)
        before = [cache.flatten(0, 1).clone() for cache in caches]
        step = start_tree(state, inputs, inputs.sample_at_L)
        path = walk_tree(state, inputs, step, case.drawn, num_rows, width, case.blocked if blocks else None)
        gather_path(caches, inputs.loc_T, path)
        first = 0
        for row, slot in enumerate(case.slots):
            begin, count = case.kv_len[row], len(case.ids[row])
            for node in range(count):
                way = path_to(case.parents[row], node)
                assert inputs.positions_T[first + node] == begin + len(way) - 1
                assert inputs.counter_L[first + node] == case.num_output[row] + len(way) - 1
                assert step.seen_T[first + node] == sum(1 << each for each in way)
                assert step.tail_T[first + node] == begin
            nodes = walked(case, row, first, blocks=blocks)
            drawn = [int(case.drawn[first + node]) for node in nodes]
            assert path.result[row].tolist() == [len(nodes), *drawn, *[-1] * (width - len(nodes))]
            if nodes:
                assert state.last_token[slot] == drawn[-1]
            assert state.kv_len[slot] == begin + len(nodes)
            assert state.num_output[slot] == case.num_output[row] + len(nodes)
            for place, node in enumerate(nodes):
                assert path.from_T[first + place] == path.from_L[first + place] == first + node
                source, target = int(inputs.loc_T[first + node]), int(inputs.loc_T[first + place])
                for cache, was in zip(caches, before, strict=True):
                    assert torch.equal(cache.flatten(0, 1)[target], was[source])
            first += count
        assert path.from_T[first:].tolist() == [first, first + 1]
        assert inputs.positions_T[first:].tolist() == [0, 1]
        assert step.tail_T[first:].tolist() == [1, 2]
        assert not step.seen_T[first:].any()
