"""Sliding windows: frees pages that no later query can see, while their rows run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bough.cache.prefix import PrefixCache
from bough.core.step import I64
from bough.scheduler.queues import Queues

_NO_PAGES = np.empty(0, np.int32)


def pass_windows(queues: Queues, cache: PrefixCache, slot_ids: I64) -> None:
    """Frees the window columns that these rows no longer see.

    A step in flight begins no earlier than where the row is known to be: drafts that turn out wrong take it back that far
    and no further. So it does not read what is given up here.
    """
    slots, size = queues.slots, cache.page_size
    settled = slots.kv_settled[slot_ids]
    for at, window in enumerate(slots.layout.windows):
        gone = window.lifetime.first_needed(settled) // size
        before = slots.gone[at, slot_ids]
        rows = np.flatnonzero(gone > before)
        if not len(rows):
            continue
        passed = [
            _give_up(queues, cache, slot, at, first, last)
            for slot, first, last in zip(
                slot_ids[rows].tolist(), before[rows].tolist(), gone[rows].tolist(), strict=True
            )
        ]
        slots.gone[at, slot_ids[rows]] = gone[rows]
        cache.free_private(np.concatenate(passed))


def _give_up(queues: Queues, cache: PrefixCache, slot: int, at: int, first: int, last: int) -> npt.NDArray[np.int32]:
    """Columns `first .. last - 1` of a row in a window: those that the tree owns are given back to it. Returns the pages
    that the row owns."""
    slots = queues.slots
    own = max(first, int(slots.tree_columns[slot]))
    if first < own:
        phase = queues.running.get(slot) or queues.prefilling.get(slot) or queues.leaving[slot]
        cache.pass_columns(phase.node, at, first, min(last, own))
    if own >= last:
        return _NO_PAGES
    part = slots.table[slots.layout.windows[at].pages, slot, own:last]
    pages = part.flatten()
    part[:] = 0
    return pages
