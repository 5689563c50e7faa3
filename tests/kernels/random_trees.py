"""Random trees of drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bough.kernels.attention.inputs import TreeMask
from bough.kernels.step_start import SlotState

MOST_NODES = 64


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    """Of nodes 1 .. `nodes`: what each follows. Node 0 is the root."""
    return [rng.randrange(node + 1) if rng.random() < 0.6 else node for node in range(nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to this one."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def tree_mask(rng: random.Random, rows: list[tuple[int, int]], tokens: int) -> tuple[TreeMask, list[list[int] | None]]:
    """A mask for rows of (queries, context): those of up to 64 queries are trees, others see what comes before. Also each
    row's parents; `tokens`: with padding."""
    seen, tail, positions, parents = [], [], [], []
    for queries, context in rows:
        if queries > MOST_NODES:
            seen += [0] * queries
            tail += [context + place + 1 for place in range(queries)]
            positions += range(context, context + queries)
            parents.append(None)
            continue
        mine = random_parents(rng, queries - 1)
        for node in range(queries):
            path = path_to(mine, node)
            bits = sum(1 << each for each in path)
            seen.append(bits - 2**64 if bits >= 2**63 else bits)
            positions.append(context + len(path) - 1)
        tail += [context] * queries
        parents.append(mine)
    more = tokens - len(seen)
    mask = TreeMask(
        torch.tensor([*seen, *[0] * more]),
        torch.tensor([*tail, *[0] * more], dtype=torch.int32),
        torch.tensor([*positions, *[0] * more]),
    )
    return mask, parents


@dataclass
class TreeStepCase:
    """Rows with trees of drafts, as a step has them behind `start_step`, then a prompt of another row, then padding."""

    num_rows: int
    parents: list[list[int]]
    """By row."""
    ids: list[list[int]]
    """Of each row's root and nodes."""
    slots: list[int]
    kv_len: list[int]
    num_output: list[int]
    drawn: Tensor
    blocked: Tensor
    most: int
    page_size: int
    pages_per_slot: int

    def made(self, device: torch.device) -> tuple[SlotState, Any, list[Tensor]]:
        """The slots, the step's arrays, and two caches."""
        count = max(self.slots) + 2
        state = SlotState.make(count, self.pages_per_slot, device, most_drafts=self.most, trees=True)
        assert state.tree is not None
        generator = torch.Generator().manual_seed(1)
        state.page_table.copy_(
            1 + torch.randperm(state.page_table.numel(), generator=generator).view_as(state.page_table)
        )
        tokens: dict[str, list[int]] = {"ids": [], "positions": [], "slots": [], "loc": []}
        samples: dict[str, list[int]] = {"at": [], "slots": [], "counter": []}
        starts = [0]
        for row, slot in enumerate(self.slots):
            state.kv_len[slot], state.num_output[slot] = self.kv_len[row], self.num_output[row]
            for node, parent in enumerate(self.parents[row], 1):
                path = path_to(self.parents[row], node)
                bits = sum(1 << each for each in path)
                state.tree.parents[slot, node - 1] = parent
                state.tree.depth[slot, node - 1] = len(path) - 1
                state.tree.seen[slot, node - 1] = bits - 2**64 if bits >= 2**63 else bits
            for place, token in enumerate(self.ids[row]):
                position = self.kv_len[row] + place
                page = int(state.page_table[slot, position // self.page_size])
                samples["at"].append(len(tokens["ids"]))
                samples["slots"].append(slot)
                samples["counter"].append(self.num_output[row] + place)
                tokens["ids"].append(token)
                tokens["positions"].append(position)
                tokens["slots"].append(slot)
                tokens["loc"].append(page * self.page_size + position % self.page_size)
            starts.append(len(samples["at"]))
        derived = [len(tokens["ids"]), self.num_rows, len(samples["at"])]
        other = count - 1
        for name, values in (("ids", [5, 6]), ("positions", [0, 1]), ("slots", [other] * 2), ("loc", [-1, -1])):
            tokens[name] += values
        long = {name: torch.tensor(values, device=device) for name, values in tokens.items()}
        held = {name: torch.tensor(values, device=device) for name, values in samples.items()}
        inputs = SimpleNamespace(
            ids_T=long["ids"], positions_T=long["positions"], token_slots_T=long["slots"], loc_T=long["loc"],
            sample_at_L=held["at"], sample_slots_L=held["slots"], counter_L=held["counter"],
            sample_start_R1=torch.tensor(starts, dtype=torch.int32, device=device),
            derived=torch.tensor(derived, dtype=torch.int32, device=device),
        )  # fmt: skip
        pages = state.page_table.numel() + 1
        caches = [torch.randn(pages, self.page_size, 2, width, generator=generator).to(device) for width in (4, 6)]
        return state, inputs, caches


def tree_step(rng: random.Random, num_rows: int, most: int, width: int, page_size: int = 4) -> TreeStepCase:
    """Trees at most `width` - 1 deep, of few different tokens, so that many are drawn."""
    parents, ids = [], []
    for _ in range(num_rows):
        mine: list[int] = []
        tokens = [rng.randrange(4)]
        taken: set[tuple[int, int]] = set()
        for _ in range(rng.randrange(most + 1)):
            parent, token = rng.randrange(len(mine) + 1), rng.randrange(4)
            if len(path_to([*mine, parent], len(mine) + 1)) > width or (parent, token) in taken:
                continue
            taken.add((parent, token))
            mine.append(parent)
            tokens.append(token)
        parents.append(mine)
        ids.append(tokens)
    total = sum(map(len, ids))
    drawn = torch.tensor([rng.randrange(4) for _ in range(total)])
    pages_per_slot = -(-(40 + most + 1) // page_size)
    return TreeStepCase(
        num_rows, parents, ids, rng.sample(range(num_rows + 3), num_rows), [rng.randrange(40) for _ in ids],
        [rng.randrange(9) for _ in ids], drawn, torch.tensor([rng.random() < 0.1 for _ in range(total)]), most, page_size,
        pages_per_slot,
    )  # fmt: skip
