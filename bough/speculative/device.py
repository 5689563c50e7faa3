"""How many drafts a proposer on the device makes: as many as yield the most tokens a millisecond, by how often they are
right and what steps take, for each range of batch sizes.

Rows need not wait: a step verifies what the one before it left, and leaves drafts for the next. All rows of a step have as
many, since the proposer makes them for all rows at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from bough.core.step import FIRST_DRAFT, I32, I64, NO_PROPOSER, Bool
from bough.scheduler.drafting import Offer
from bough.scheduler.queues import Job, Queues
from bough.speculative.acceptance import F64
from bough.speculative.costs import rows_of

_PRIOR_RATE, _PRIOR_ROWS = 0.6, 16.0
"""How often a draft is right whose predecessors are, as long as nothing is known, and how many rows that counts as."""
_MEMORY_ROWS = 2000.0
"""Rows after which an older one counts a third."""
_TIMES = 15
"""Steps whose times are remembered for each number of drafts: their median is not moved by one slow step."""
_ENOUGH = 4
"""Steps of a kind that are timed before they are compared."""
_FIRST_SLOPE = 0.15
"""Of a step's time: what one draft more takes, as long as it was not measured."""
_CLEAR_GAIN = 1.03
"""Factor by which another number of drafts must promise more tokens a second before it is taken."""
_COMPARE_EVERY = 8
"""Steps between two comparisons of numbers of drafts."""
_LOOK_STEPS = 5
"""Steps for which another number of drafts is tried. The first of them still has the drafts of the number before."""
_LOOK_EVERY = 256
"""Steps between two trials, at least."""
_LOOK_LOSS = 0.005
"""The largest part of the time that trials may take; steps between two trials follow from it."""
_TIRED_STEPS = 256
"""Steps without a gain after which a proposer that costs something stops altogether."""
_CHEAP = 0.02
"""Part of a step that keeping the KV of a proposer takes at most for it not to be stopped."""
_SLEEP_STEPS, _LONGEST_SLEEP = 2048, 32768
"""Steps that a stopped proposer rests: the first time, and at most. The time doubles with each rest."""


class PlaceRates:
    """By range of batch sizes and place: how often a draft is right if those before it are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tried: dict[int, F64] = {}
        self._right: dict[int, F64] = {}

    def observe(self, rows: int, drafts: I32, accepted: I32) -> None:
        """Of rows of one step: their drafts, and how many of them were right."""
        tried, right = self._of(rows)
        keep = float(np.exp(-len(drafts) / _MEMORY_ROWS))
        place = np.arange(self._most)
        tried *= keep
        right *= keep
        tried += np.count_nonzero((drafts[:, None] > place) & (accepted[:, None] >= place), axis=0)
        right += np.count_nonzero(accepted[:, None] > place, axis=0)

    def expected(self, rows: int) -> F64:
        """[most + 1]: tokens that a row yields in a step, by its number of drafts."""
        tried, right = self._of(rows)
        survival = np.multiply.accumulate(right / tried)
        return np.concatenate(([1.0], 1.0 + np.add.accumulate(survival)))

    def _of(self, rows: int) -> tuple[F64, F64]:
        if rows not in self._tried:
            nearest = min(self._tried, key=lambda each: abs(each - rows), default=None)
            rate = np.full(self._most, _PRIOR_RATE) if nearest is None else self._right[nearest] / self._tried[nearest]
            self._tried[rows] = np.full(self._most, _PRIOR_ROWS)
            self._right[rows] = _PRIOR_ROWS * rate
        return self._tried[rows], self._right[rows]


class TreeRates:
    """By range of batch sizes and number of nodes: how many nodes are on the path that is taken."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, dict[int, tuple[float, float]]] = {}
        """Range -> nodes -> rows and their accepted nodes, older ones counting less."""

    def observe(self, rows: int, drafts: I32, accepted: I32) -> None:
        keep = float(np.exp(-len(drafts) / _MEMORY_ROWS))
        known = self._seen.setdefault(rows, {})
        for count in np.unique(drafts).tolist():
            mine = drafts == count
            before, right = known.get(count, (0.0, 0.0))
            known[count] = keep * before + np.count_nonzero(mine), keep * right + float(accepted[mine].sum())

    def expected(self, rows: int) -> F64:
        """[most + 1]: tokens that a row yields in a step, by its number of nodes. Twice as many nodes add about as much each
        time, so what was not tried lies on a line over the logarithm."""
        nearest = min(self._seen, key=lambda each: abs(each - rows), default=None)
        points = {0: 1.0}
        for count, (tried, right) in ({} if nearest is None else self._seen[nearest]).items():
            prior = _PRIOR_RATE * (1.0 + np.log2(count)) / 2.0
            points[count] = 1.0 + (right + _PRIOR_ROWS * prior) / (tried + _PRIOR_ROWS)
        if len(points) == 1:
            points[self._most] = 1.0 + _PRIOR_RATE * (1.0 + np.log2(self._most)) / 2.0
        counts = sorted(points)
        made: F64 = np.interp(
            np.log1p(np.arange(self._most + 1)), np.log1p(counts), [points[count] for count in counts]
        )
        return made


class _Range:
    """What is known of steps of about as many rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: dict[int, deque[float]] = {}
        self.chosen = most
        self.trial: int | None = None
        self.trials = 0
        """Steps that the trial still lasts."""
        self.rest = _LOOK_EVERY
        """Steps until the next one."""

    @property
    def current(self) -> int:
        return self.chosen if self.trial is None else self.trial

    def add(self, drafts: int, ms: float) -> None:
        self._recent.setdefault(drafts, deque(maxlen=_TIMES)).append(ms)

    def known(self, drafts: int) -> bool:
        return len(self._recent.get(drafts, ())) >= _ENOUGH

    def times(self) -> F64:
        """[most + 1]: milliseconds of a step by its drafts; measured, on a line between measurements, or beyond them."""
        known = sorted(drafts for drafts in self._recent if self.known(drafts))
        ms = [float(np.median(self._recent[drafts])) for drafts in known]
        wanted = np.arange(self._most + 1)
        if len(known) == 1:
            base = ms[0] / (1.0 + _FIRST_SLOPE * known[0])
            made: F64 = np.multiply(1.0 + _FIRST_SLOPE * wanted, base, dtype=np.float64)
            return made
        made = np.interp(wanted, known, ms)
        slope = max(ms[-1] - ms[0], 0.0) / (known[-1] - known[0])
        made[wanted > known[-1]] += slope * (wanted[wanted > known[-1]] - known[-1])
        made[wanted < known[0]] -= np.minimum(slope * (known[0] - wanted[wanted < known[0]]), 0.5 * ms[0])
        return made


class DeviceDrafter:
    """A `scheduler.drafting.Drafter` for a proposer on the device."""

    def __init__(
        self,
        most: int,
        num_slots: int,
        *,
        adaptive: bool,
        reach: Callable[[int], int],
        upkeep: float = 0.0,
        trees: bool = False,
    ) -> None:
        """`most`: drafts of a row. `adaptive`: only as many as pay; otherwise always as many. `reach`: as in `Drafter`.
        `upkeep`: the part of a step that the proposer takes even if it makes no drafts. `trees`: drafts are their nodes."""
        self.most = most
        self._counts = np.unique([0, most // 4, most // 2, most]) if trees else np.arange(most + 1)
        """Numbers of drafts that are chosen from."""
        self._adaptive = adaptive
        self._reach = reach
        self._upkeep = upkeep
        self.rates: PlaceRates | TreeRates = TreeRates(most) if trees else PlaceRates(most)
        self._ranges: dict[int, _Range] = {}
        self._may_draft = np.zeros(num_slots, np.bool_)
        self._covered = np.zeros(num_slots, np.bool_)
        """Slots whose row the proposer has seen from its beginning."""
        self._tired = 0
        self._asleep = 0
        """Steps that the proposer is still to rest; 0: it is awake."""
        self._sleep = _SLEEP_STEPS
        self._slept_at = 0

    # -- planning ---------------------------------------------------------------------------------

    def waits(self, queues: Queues, slots: I64) -> Bool:
        return np.zeros(len(slots), np.bool_)

    def offer(self, queues: Queues, slots: I64, most: I32, num_tokens: int) -> Offer | None:
        ready = self._may_draft[slots] & self._covered[slots]
        count = min(self._current(len(slots)), num_tokens // max(1, int(np.count_nonzero(ready))))
        counts: I32 = np.minimum(most, queues.slots.num_proposed[slots])
        counts = np.where(ready, np.minimum(counts, np.int32(max(count, 0))), 0).astype(np.int32)
        total = int(counts.sum())
        if not total:
            return None
        place = np.arange(total) - (np.cumsum(counts) - counts).repeat(counts)
        return Offer(counts, (FIRST_DRAFT - place).astype(np.int32))

    def proposals(self, num_rows: int) -> int:
        return NO_PROPOSER if self._asleep else self._current(num_rows)

    def reach(self, proposals: int) -> int:
        return self._reach(proposals)

    def _current(self, num_rows: int) -> int:
        if not self._adaptive:
            return self.most
        found = self._ranges.get(rows_of(max(num_rows, 1)))
        return self.most if found is None else found.current

    # -- learning ---------------------------------------------------------------------------------

    def begin(self, slot: int, job: Job) -> None:
        self._may_draft[slot] = job.may_draft
        self._covered[slot] = not self._asleep

    def learn(self, queues: Queues, slots: I64, drafts: I32, accepted: I32) -> None:
        if self._asleep:
            self._covered[slots] = False
            return
        had = drafts > 0
        if np.count_nonzero(had):
            self.rates.observe(rows_of(len(slots)), drafts[had], accepted[had])

    def timed(self, num_rows: int, num_tokens: int, ms: float, proposals: int) -> None:
        if not self._adaptive:
            return
        if self._asleep:
            woken = num_rows * 4 <= self._slept_at
            self._asleep = 0 if woken else self._asleep - 1
            return
        rows = rows_of(num_rows)
        known = self._ranges.setdefault(rows, _Range(self.most))
        if num_tokens == num_rows * (1 + proposals):
            known.add(proposals, ms)
        self._look(rows, known)
        self._rest(num_rows, known)

    def _look(self, rows: int, known: _Range) -> None:
        """Chooses the number of drafts, and now and then tries another one."""
        if known.trial is not None:
            known.trials -= 1
            if known.trials > 0:
                return
            known.trial = None
        known.rest -= 1
        if known.rest % _COMPARE_EVERY or not known.known(known.chosen):
            return
        if not known.known(0):
            known.trial, known.trials = 0, _LOOK_STEPS
            return
        expected, times = self.rates.expected(rows), known.times()
        worth = np.zeros(self.most + 1)
        worth[self._counts] = (expected / times)[self._counts]
        best = int(worth.argmax())
        if worth[best] > _CLEAR_GAIN * worth[known.chosen]:
            known.chosen = best
        if known.rest <= 0:
            now, others = worth[known.chosen], worth.copy()
            others[known.chosen] = 0.0
            known.trial, known.trials = int(others.argmax()), _LOOK_STEPS
            loss = max(now / others.max() - 1.0, 0.0)
            known.rest = max(_LOOK_EVERY, int(_LOOK_STEPS * loss / _LOOK_LOSS))

    def _rest(self, num_rows: int, known: _Range) -> None:
        """Stops a proposer whose upkeep is not worth it."""
        self._tired = self._tired + 1 if known.chosen == 0 else 0
        if known.chosen > 0:
            self._sleep = _SLEEP_STEPS
        if self._upkeep > _CHEAP and self._tired >= _TIRED_STEPS:
            self._asleep, self._slept_at, self._tired = self._sleep, num_rows, 0
            self._sleep = min(2 * self._sleep, _LONGEST_SLEEP)

    def forget(self, queues: Queues, slot: int, job: Job, *, has_ended: bool) -> None:
        self._may_draft[slot] = self._covered[slot] = False
