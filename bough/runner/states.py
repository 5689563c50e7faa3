"""Which tokens of a step advance which states, in which order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bough.core.step import Step
from bough.layers.batch import BatchStates, StatePhase
from bough.memory.states import StatePool
from bough.memory.transfer import upload


def load_states(step: Step, pool: StatePool) -> None:
    """Gives rows that enter their states. Before the step's forward pass."""
    made = step.states
    if made is not None and len(made.load_slots):
        pool.load(made.load_slots, made.load_from)


def save_states(step: Step, pool: StatePool) -> None:
    """Saves states that are wanted behind the last token of a row. After the forward pass."""
    made = step.states
    if made is not None and len(made.save_rows):
        ends = made.save_after == step.num_query[made.save_rows]
        if ends.any():
            pool.save(step.slots[made.save_rows[ends]], made.save_to[ends])


def lone_tokens(pool: StatePool, token_slots_T: Tensor) -> BatchStates:
    """For steps whose rows have one token each, padding included: nothing of it depends on values on the host."""
    return BatchStates(pool.layers, all_ones_N=token_slots_T + 1)


def states_of(step: Step, pool: StatePool, token_slots_T: Tensor) -> BatchStates:
    """Lays out the step's tokens. A row whose state is saved behind some of its tokens is cut there; its parts are in phases
    that follow one another."""
    if step.num_rows == step.num_tokens:
        return lone_tokens(pool, token_slots_T)
    made = step.states
    cuts: dict[int, list[tuple[int, int]]] = {}
    if made is not None and len(made.save_rows):
        within = made.save_after < step.num_query[made.save_rows]
        to = pool.snapshots(made.save_to[within]).tolist()
        for row, after, place in zip(
            made.save_rows[within].tolist(), made.save_after[within].tolist(), to, strict=True
        ):
            cuts.setdefault(row, []).append((after, place))
    starts = np.cumsum(step.num_query) - step.num_query
    phases = [_Phase()]
    for row, (slot, start, count) in enumerate(
        zip(step.slots.tolist(), starts.tolist(), step.num_query.tolist(), strict=True)
    ):
        begin = 0
        for number, (end, place) in enumerate([*cuts.get(row, ()), (count, 0)]):
            if number == len(phases):
                phases.append(_Phase())
            phases[number].add(1 + slot, start + begin, start + end, place)
            begin = end
    return BatchStates(pool.layers, [phase.done(pool.device) for phase in phases])


class _Phase:
    def __init__(self) -> None:
        self.ones: list[tuple[int, int]] = []
        self.longs: list[tuple[slice, int]] = []
        self.saves: list[tuple[int, int]] = []

    def add(self, state: int, begin: int, end: int, place: int) -> None:
        """Tokens `begin .. end - 1` of a row with this state, which is then saved at `place`, unless that is 0."""
        if end - begin == 1:
            self.ones.append((begin, state))
        elif end > begin:
            self.longs.append((slice(begin, end), state))
        if place:
            self.saves.append((state, place))

    def done(self, device: torch.device) -> StatePhase:
        ones = upload(np.array(self.ones, np.int64).reshape(-1, 2), device)
        saves = upload(np.array(self.saves, np.int64).reshape(-1, 2), device)
        return StatePhase(ones[:, 0], ones[:, 1], tuple(self.longs), (saves[:, 0], saves[:, 1]) if self.saves else None)
