"""Which tokens of a step advance which states, in which order."""

from __future__ import annotations

import numpy as np
import torch

from bough.core.step import I64, Step
from bough.layers.batch import BatchStates, DraftedRows, StatePhase
from bough.memory.states import StatePool
from bough.memory.transfer import upload
from bough.runner.inputs import StepTensors


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


class DraftHistory:
    """Which slots' rows had drafts in their last step: only they have something to take in."""

    def __init__(self, num_slots: int) -> None:
        self._had = np.zeros(num_slots, np.bool_)

    def note(self, step: Step) -> bool:
        """Whether a decode row of the step has drafts, or had some. From now on this is the last step of its rows."""
        decodes = step.slots[: step.num_decodes]
        drafted = bool(self._had[decodes].any()) or bool(step.drafts.any())
        self._had[step.slots] = False
        if len(step.drafts):
            self._had[decodes] = step.drafts > 0
        return drafted


class StepState:
    """The states of one step, once its first launch has completed what only the device knows."""

    def __init__(self, pool: StatePool, drafted: int = 0, step: Step | None = None) -> None:
        """`drafted`: how many tokens decode rows have, at most, if some have drafts or had; 0: none. `step`: where it is not
        captured; without one each row has one token, or all of them decode."""
        self._pool, self._step = pool, step
        self._drafted = min(drafted, 1 + pool.most_drafts)

    def begin(self, tensors: StepTensors) -> BatchStates:
        """Lays out the step's tokens. Nothing of a captured step depends on values on the host."""
        pool, step = self._pool, self._step
        drafted = self._drafted_rows(tensors) if self._drafted else None
        if pool.most_drafts:
            self._count(tensors)
        if drafted is None and (step is None or step.num_rows == step.num_tokens):
            return BatchStates(pool.layers, all_ones_N=tensors.token_slots_T + 1)
        phases = () if step is None else _phases(step, pool, step.num_decodes if drafted is not None else 0)
        return BatchStates(pool.layers, phases, drafted=drafted, kept=pool.kept)

    def _drafted_rows(self, tensors: StepTensors) -> DraftedRows:
        pool, step = self._pool, self._step
        rows = slice(0, len(tensors.slots_R) if step is None else step.num_decodes)
        slots_R, first_R = tensors.slots_R[rows].long(), tensors.query_start_R1[:-1][rows].long()
        count_R = tensors.query_start_R1[1:][rows].long() - first_R
        at_R = tensors.positions_T[first_R.clamp_max(len(tensors.positions_T) - 1)]
        kept_R = (at_R - pool.num_taken[slots_R]).clamp(0, pool.most_drafts)
        if step is None:  # a row whose prompt ends with one token has taken in everything before
            derived = torch.arange(len(kept_R), device=kept_R.device) < tensors.derived[1]
            kept_R = torch.where(derived, kept_R, 0)
        most = pool.most_drafts if step is None or kept_R.is_cuda else int(kept_R.max())
        return DraftedRows(slots_R, first_R, count_R, kept_R, most, self._drafted, pool.padding)

    def _count(self, tensors: StepTensors) -> None:
        """Notes how many tokens the rows' states will have taken in: a decode row's newest, and all of others."""
        first_R = tensors.query_start_R1[:-1].long()
        count_R = tensors.query_start_R1[1:].long() - first_R
        decodes = torch.arange(len(first_R), device=first_R.device) < tensors.derived[1]
        at_R = tensors.positions_T[first_R.clamp_max(len(tensors.positions_T) - 1)]
        self._pool.num_taken[tensors.slots_R.long()] = at_R + torch.where(decodes, 1, count_R)


def _phases(step: Step, pool: StatePool, first_row: int) -> list[StatePhase]:
    """The rows from `first_row` on. A row whose state is saved behind some of its tokens is cut there; its parts are in
    phases that follow one another."""
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
    for row in range(first_row, step.num_rows):
        slot, start, count = int(step.slots[row]), int(starts[row]), int(step.num_query[row])
        begin = 0
        for number, (end, place) in enumerate([*cuts.get(row, ()), (count, 0)]):
            if number == len(phases):
                phases.append(_Phase())
            phases[number].add(1 + slot, start + begin, start + end, place)
            begin = end
    return [phase.done(pool.device) for phase in phases]


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
        at_N, states_N = upload(_columns(self.ones), device)
        source, target = upload(_columns(self.saves), device)
        return StatePhase(at_N, states_N, tuple(self.longs), (source, target) if self.saves else None)


def _columns(pairs: list[tuple[int, int]]) -> I64:
    """[2, N], each column of pairs in one piece: kernels read the numbers of states one after the other."""
    return np.ascontiguousarray(np.array(pairs, np.int64).reshape(-1, 2).T)
