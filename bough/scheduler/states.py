"""Recurrent states: where a row's state comes from, and which states are saved in the tree.

A row begins with the state of the prefix that it found, or with none. Of prompts the state is saved behind the last full
page of each chunk, and where the prompt leaves what the tree has: others may part there, too. Where the last
page ends with the prompt, the same prompt can't use that, as it computes its last token anew: the state is saved a page
before, too (instead, with pages of one token). Of answers it is saved every
`Limits.state_interval` tokens in one place of the row's own, which the tree gets when the row lets go.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from bough.cache.nodes import Node
from bough.cache.prefix import PrefixCache
from bough.core.step import I32, I64, StepStates
from bough.scheduler.queues import Job, Queues


class StateSave(Struct, frozen=True):
    """A state that was saved, or will be by the step that it belongs to."""

    slot: int
    num_tokens: int
    place: int


class StateStep:
    """Builds what one step does with recurrent states."""

    def __init__(self, queues: Queues, cache: PrefixCache, loads: list[tuple[int, int]]) -> None:
        self._queues, self._cache = queues, cache
        self._loads = loads
        self._rows: list[int] = []
        self._after: list[int] = []
        self._to: list[int] = []
        self.saves: list[StateSave] = []
        """Of chunks."""

    def add_decodes(self, slot_ids: I64, context: I32) -> None:
        """Rows that decode, the step's first. Of rows with drafts, in this step or in flight, it is not known how many
        tokens their states will have taken in: they are not saved."""
        slots, size = self._queues.slots, self._cache.page_size
        if not self._cache.enabled:
            return
        after = context + 1
        every = -(-self._queues.limits.state_interval // size) * size
        known = slots.out_high[slot_ids] == slots.out_low[slot_ids]
        for row in np.flatnonzero(known & (after % every == 0)).tolist():
            slot = int(slot_ids[row])
            place = int(slots.snapshot[slot]) or self._cache.tree.lend_snapshot()
            slots.snapshot[slot] = place
            slots.snapshot_at[slot] = after[row]
            if place:
                self._save(row, 1, place)

    def add_chunk(
        self, row: int, slot: int, start: int, num_tokens: int, job: Job, in_tree: int, *, is_last: bool
    ) -> None:
        """A chunk of a prompt, of which the tree had `known` tokens. `is_last`: the prompt ends with it."""
        if not self._cache.enabled:
            return
        size = self._cache.page_size
        end = job.tree_end(start + num_tokens)
        again = job.tree_end(start + num_tokens - is_last)
        end, again = end - end % size, again - again % size
        for at in sorted({in_tree, again, end if size > 1 else again}):
            if start < at <= end:
                place = self._cache.tree.lend_snapshot()
                if place:
                    self._save(row, at - start, place)
                    self.saves.append(StateSave(slot, at, place))

    def _save(self, row: int, after: int, place: int) -> None:
        self._rows.append(row)
        self._after.append(after)
        self._to.append(place)

    def done(self) -> StepStates:
        slots, places = zip(*self._loads, strict=True) if self._loads else ((), ())
        arrays = (np.array(each, np.int32) for each in (slots, places, self._rows, self._after, self._to))
        load_slots, load_from, rows, after, to = arrays
        return StepStates(load_slots=load_slots, load_from=load_from, save_rows=rows, save_after=after, save_to=to)


def keep_state(cache: PrefixCache, node: Node, save: StateSave, step: int) -> None:
    """Attaches a saved state to the tree, if a node ends there. `step` writes it."""
    if node.depth == save.num_tokens:
        cache.tree.keep_snapshot(node, save.place, step)
    else:
        give_up_state(cache, save)


def give_up_state(cache: PrefixCache, save: StateSave) -> None:
    """Frees a saved state that nothing will read."""
    assert cache.snapshots is not None, "layers keep states"
    cache.snapshots.give_back(save.place)


def take_state(queues: Queues, slot: int) -> StateSave | None:
    """The state that a row has saved while it decoded, which is the caller's from now on."""
    slots = queues.slots
    place = int(slots.snapshot[slot])
    if not place:
        return None
    slots.snapshot[slot] = 0
    return StateSave(slot, int(slots.snapshot_at[slot]), place)


def drop_state(queues: Queues, cache: PrefixCache, slot: int) -> None:
    """Gives up the state that a row has saved, if the tree did not get it."""
    save = take_state(queues, slot)
    if save is not None:
        give_up_state(cache, save)
    queues.slots.state_step[slot] = -1
