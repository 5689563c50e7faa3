"""The host's state of each slot, as arrays: a step of a thousand rows reads and writes array columns, not objects."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bough.cache.fixed import FixedContent
from bough.core.kv import TablePlaces
from bough.core.step import I32, I64, Bool
from bough.scheduler.drafting import MOST_DRAFTS
from bough.scheduler.limits import Limits

NUM_STOP_IDS = 8
"""Stop ids kept in the table; a row with more has them in `more_stops` too."""
NO_TOKEN = -1
NEVER = np.iinfo(np.int32).max
UNKNOWN_TURN = np.iinfo(np.int32).min
"""Marks a slot whose turn has to be sent again, because the step that changed it failed."""
UNKNOWN_LENGTH = -1
"""Marks a slot whose media length has to be sent again."""
ONE = np.array(1, np.int32)
"""The number 1 as an array: numpy adds it to a column in half the time that a Python number takes."""


class SlotTable:
    """Columns by slot. What steps in flight will yield is known by its bounds:

    | tokens | settled | once all launched steps have run | may not exceed |
    |---|---|---|---|
    | output | `out_settled` | `out_low` to `out_high` | `out_limit` |
    | with KV | `kv_settled` | at most `kv_high`, which has pages | `context_length` |
    | in `history` | `known`, which is `prompt_len + out_settled` | | |

    Without drafts, `out_low` is `out_high`. The newest token has no KV before the next step computes it.
    """

    def __init__(self, limits: Limits) -> None:
        n = limits.num_slots
        self.num_slots = n
        self.pages_per_slot = limits.pages_per_slot
        self.layout = limits.layout
        self.places = TablePlaces(limits.layout, n, limits.pages_per_slot)
        self.request_id: I64 = np.zeros(n, np.int64)
        self.seq: I64 = np.zeros(n, np.int64)
        """Order of arrival."""
        self.priority: I32 = np.zeros(n, np.int32)
        self.prompt_len: I32 = np.zeros(n, np.int32)
        self.known: I32 = np.zeros(n, np.int32)
        """Tokens in `history`: the prompt and the settled output."""
        self.kv_high: I32 = np.zeros(n, np.int32)
        """KV tokens, for which there are pages."""
        self.kv_settled: I32 = np.zeros(n, np.int32)
        """KV tokens that are computed for certain."""
        self.out_high: I32 = np.zeros(n, np.int32)
        self.out_low: I32 = np.zeros(n, np.int32)
        """Minimum number of output tokens: each launched step yields at least one. A row that has reached its limit is
        not planned again."""
        self.out_settled: I32 = np.zeros(n, np.int32)
        self.out_limit: I32 = np.zeros(n, np.int32)
        self.num_decoded: I32 = np.zeros(n, np.int32)
        """Steps that the row decoded in, while drafts are made."""
        self.num_drafts: I32 = np.zeros(n, np.int32)
        """Drafts of the row that were verified."""
        self.num_accepted: I32 = np.zeros(n, np.int32)
        """Of `num_drafts`, those that were right."""
        self.num_right_in: npt.NDArray[np.int32] = np.zeros((n, 1 + MOST_DRAFTS), np.int32)
        """By number of right drafts: the steps with drafts that had as many."""
        self.num_proposed: I32 = np.zeros(n, np.int32)
        """Drafts that the row's latest step leaves on the device."""
        self.min_new: I32 = np.zeros(n, np.int32)
        self.stop_ids: npt.NDArray[np.int32] = np.full((n, NUM_STOP_IDS), NO_TOKEN, np.int32)
        self.more_stops: dict[int, frozenset[int]] = {}
        self.num_columns: I32 = np.zeros(n, np.int32)
        self.tree_columns: I32 = np.zeros(n, np.int32)
        """Leading columns of the row that belong to the tree; the others are its own."""
        self.gone: npt.NDArray[np.int32] = np.zeros((len(self.layout.windows), n), np.int32)
        """Per window: leading columns that the row does not see and has given up."""
        self.table: npt.NDArray[np.int32] = np.zeros((self.layout.column_pages, n, limits.pages_per_slot), np.int32)
        """Mirror of the device's page table: page of a column, slot, column. Columns of windows that are gone hold
        anything."""
        self.history: npt.NDArray[np.int32] = np.zeros((n, limits.context_length), np.int32)
        """Token ids. The memory is the system's until a slot uses it."""
        self.last_step: I64 = np.full(n, -1, np.int64)
        """Latest step that the row is in."""
        self.live: Bool = np.zeros(n, np.bool_)
        """What steps yield for the row still counts."""
        self.emitted: I32 = np.zeros(n, np.int32)
        """Output tokens that have been sent."""
        self.hold: I32 = np.ones(n, np.int32)
        """Output tokens to gather before they are sent."""
        self.watched: Bool = np.zeros(n, np.bool_)
        """Its tokens are streamed to a client."""
        self.pinned: Bool = np.zeros(n, np.bool_)
        """Retracted too often: its memory is reserved to the end, and it is not retracted again."""
        self.turn: I32 = np.zeros(n, np.int32)
        """How far positions stand from where their KV lies, as the device has it (`StepMedia.turns`)."""
        self.media_len: I32 = np.zeros(n, np.int32)
        """Positions of media that cross attention reads, as the device has it (`StepMedia.fixed_lengths`)."""
        self.adapter: I32 = np.zeros(n, np.int32)
        """The row's adapter, counted from 1; 0: it has none."""
        self.content: dict[int, FixedContent] = {}
        """The media of rows whose cross attention reads some."""
        self.snapshot: I32 = np.zeros(n, np.int32)
        """Where a state of the row is that its steps have saved while it decoded; 0: nowhere."""
        self.snapshot_at: I32 = np.zeros(n, np.int32)
        """Tokens of the row that the state in `snapshot` has seen."""
        self.state_step: I64 = np.full(n, -1, np.int64)
        """The step that wrote the state that the row began with."""
        self.dirty: dict[int, tuple[int, int]] = {}
        """Columns `lo..hi` that the device's page table does not have yet."""
        self._free = list(range(n - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self.live[slot] = False
        self.num_columns[slot] = self.tree_columns[slot] = 0
        self.more_stops.pop(slot, None)
        self.dirty.pop(slot, None)
        self._free.append(slot)

    def set_stops(self, slot: int, ids: tuple[int, ...]) -> None:
        row = self.stop_ids[slot]
        row[:] = NO_TOKEN
        row[: min(len(ids), NUM_STOP_IDS)] = ids[:NUM_STOP_IDS]
        if len(ids) > NUM_STOP_IDS:
            self.more_stops[slot] = frozenset(ids[NUM_STOP_IDS:])

    def output(self, slot: int) -> I32:
        """Settled output ids (a view)."""
        out: I32 = self.history[slot, self.prompt_len[slot] : self.known[slot]]
        return out

    def private_pages(self, slot: int) -> I32:
        """Pages that are the row's own (perhaps a view)."""
        first, last = int(self.tree_columns[slot]), int(self.num_columns[slot])
        growing = self.layout.growing_pages
        if not self.layout.windows:
            pages: I32 = self.table[:, slot, first:last]
            return pages.reshape(-1)
        parts = [self.table[:growing, slot, first:last]]
        for window, gone in zip(self.layout.windows, self.gone[:, slot].tolist(), strict=True):
            parts.append(self.table[window.pages, slot, max(first, gone) : last])
        return np.concatenate([part.ravel() for part in parts])

    def num_private(self, slot: int) -> int:
        """How many pages that is."""
        first, last = int(self.tree_columns[slot]), int(self.num_columns[slot])
        count = self.layout.growing_pages * (last - first)
        for window, gone in zip(self.layout.windows, self.gone[:, slot].tolist(), strict=True):
            count += window.num_pages * max(0, last - max(first, gone))
        return count

    def settle_bounds(self, slot: int) -> None:
        """Resets the bounds of a row whose steps in flight are dropped: all its tokens are known, and the newest one
        has no KV."""
        self.kv_high[slot] = self.known[slot] - ONE
        self.out_high[slot] = self.out_low[slot] = self.out_settled[slot]

    def mark_dirty(self, slot: int, lo: int, hi: int) -> None:
        """The mirror's columns `lo..hi` changed; the row's next step carries them."""
        if slot in self.dirty:
            was_lo, was_hi = self.dirty[slot]
            lo, hi = min(lo, was_lo), max(hi, was_hi)
        self.dirty[slot] = (lo, hi)
