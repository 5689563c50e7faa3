"""How many drafts a proposer on the device makes: as many as yield the most tokens a millisecond, by how often they are
right and what steps take, for each range of batch sizes.

Rows need not wait: a step verifies what the one before it left, and leaves drafts for the next. All rows of a step have as
many, since the proposer makes them for all rows at once.

Whatever estimates say, it may lose a small part of the time only (`LossBudget`). Where that is spent the proposer rests:
steps and prompts are planned and computed as if there were none. It wakes when there is something to lose again. Rows that
were there meanwhile are not drafted for, if it keeps KV: it has not seen all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bough.core.step import FIRST_DRAFT, I32, I64, NO_PROPOSER, Bool
from bough.scheduler.drafting import Offer
from bough.scheduler.queues import Job, Queues
from bough.speculative.acceptance import F64
from bough.speculative.budget import MOST_SLOW, LossBudget
from bough.speculative.costs import StepPace, StepTimes, rows_of
from bough.speculative.rates import GOOD_RATE, PlaceRates, TreeRates

_KNOWN_AT_FIRST = 2
"""Steps with drafts of a range of batch sizes, before it is seen what steps take without."""
_FIRST_STEPS, _COLD_STEPS = 5, 2
"""The very first steps are plain ones, to compare others with; and the first of those say nothing about what others take."""
_CLEAR_GAIN = 1.03
"""Factor by which another number of drafts must promise more tokens a second before it is taken."""
_COMPARE_EVERY = 8
"""Steps between two comparisons of numbers of drafts."""
_LOOK_STEPS = 5
"""Steps for which another number of drafts is tried. The first of them still has the drafts of the number before."""
_LOOK_EVERY = 256
"""Steps between two trials, at least."""
_LOOK_LOSS = 0.005
"""...and such that trials take at most this share of the time."""
_PLAIN_EVERY = 4
"""Of as many trials one is of steps without the proposer."""
_LOSS, _FIRST_LOSS, _MOST_GAIN, _MOST_DEBT, _AGAIN = 0.01, 5.0, 12.0, 12.0, 0.5
"""Of `LossBudget`: a head shall never cost more than 5 %..."""
_FIRST_LOSS_ANYTIME = 3.0
"""...and less at first, if it can be tried again in the middle of any row..."""
_GIVEN = 0.04
"""...of which prompts, whose states it keeps, may take this part of their time unseen."""
_WAKING = 3.0
"""What there must be to lose, in plain steps, before a proposer that rests is tried again..."""
_FIRST_REST, _LONGEST_REST = 256, 32768
"""...and how many steps it rests at least: twice as many each time that it has not paid."""
_TIRED_STEPS = 256
"""Steps without a gain after which a proposer that costs something rests, too..."""
_CHEAP = 0.02
"""...if keeping its KV takes more than this part of a step."""
_MOST_AT_FIRST = 4.0
"""Plain steps that one of the first steps of a kind is booked with at most: a graph may have been captured in it."""
_MOST_UNPAID = 64
_REST_LOOK = 8
"""Of as many steps in which the proposer rests, one is looked at."""


class _Unpaid(NamedTuple):
    """A step whose gain or loss is not booked yet."""

    kind: int
    ms: float
    per_row: float
    """Tokens that a row got."""
    is_plain: bool
    """It had neither drafts nor a proposer."""


class _Range:
    """What is known of steps of about as many rows. Kinds of steps: 0 is without the proposer, 1 + n with n drafts."""

    def __init__(self, most: int, pace: StepPace) -> None:
        self.times = StepTimes(pace)
        self.chosen = most
        self.trial: int | None = None
        """As `Step.proposals`."""
        self.trials = 0
        """Steps that the trial still lasts."""
        self.rest = _LOOK_EVERY
        """Steps until the next one."""
        self.num_trials = 0
        self.plain_trials = 0
        self.plain_wait = 0
        """Steps until plain ones are tried again, where their times did not count."""
        self.unpaid: deque[_Unpaid] = deque(maxlen=_MOST_UNPAID)
        """Steps until it is known what a plain one takes."""

    @property
    def current(self) -> int:
        return self.chosen if self.trial is None else self.trial

    def ms(self, kind: int) -> float:
        found = self.times.of(kind)
        assert found is not None, "steps have been timed"
        return found

    def upkeep(self) -> float | None:
        """The part of a step with the proposer, but without drafts, that it takes; None: not measured."""
        return 1.0 - self.ms(0) / self.ms(1) if self.times.known(0) and self.times.known(1) else None

    def begin_trial(self, proposals: int) -> None:
        self.trial, self.trials = proposals, _LOOK_STEPS


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
        keeps_kv: bool = True,
        trees: bool = False,
    ) -> None:
        """`most`: drafts of a row. `adaptive`: only as many as pay; otherwise always as many. `reach`: as in `Drafter`.
        `upkeep`: an estimate of the part of a step that the proposer takes even if it makes no drafts. `keeps_kv`: it can
        draft only for rows that it has seen from their beginning. `trees`: drafts are their nodes."""
        self.most = most
        self._counts = np.unique([0, most // 4, most // 2, most]) if trees else np.arange(most + 1)
        """Numbers of drafts that are chosen from."""
        self.adaptive = adaptive
        self._reach = reach
        self._upkeep = upkeep
        self._keeps_kv = keeps_kv
        self.rates: PlaceRates | TreeRates = TreeRates(most) if trees else PlaceRates(most)
        first = _FIRST_LOSS if keeps_kv else _FIRST_LOSS_ANYTIME
        self.budget = LossBudget(_LOSS, first=first, most=_MOST_GAIN, debt=_MOST_DEBT, again=_AGAIN)
        self._pace = StepPace()
        self._ranges: dict[int, _Range] = {}
        self._may_draft = np.zeros(num_slots, np.bool_)
        self._covered = np.zeros(num_slots, np.bool_)
        """Slots whose row the proposer has seen from its beginning."""
        self._per_row = 1.0
        """Tokens that a row got of the newest step, until this is timed."""
        self._num_timed = 0
        """Steps, until there are enough for a beginning."""
        self._tired = 0
        self.is_resting = False
        self._rested = 0
        """Steps since it began to rest..."""
        self._least_rest = _FIRST_REST
        """...of at least as many."""
        self._slept_at = 0
        self._prompts_ms = 0.0
        """What prompts have taken more for the proposer, until it is paid for."""

    # -- planning ---------------------------------------------------------------------------------

    def waits(self, queues: Queues, slots: I64) -> Bool:
        return np.zeros(len(slots), np.bool_)

    def offer(self, queues: Queues, slots: I64, most: I32, num_tokens: int) -> Offer | None:
        if self.is_resting:
            return None
        ready = self._may_draft[slots] & self._covered[slots]
        count = min(self._current(len(slots)), num_tokens // max(1, int(np.count_nonzero(ready))))
        counts: I32 = np.minimum(most, queues.slots.num_proposed[slots])
        counts = np.where(ready, np.minimum(counts, np.int32(max(count, 0))), 0).astype(np.int32)
        total = int(counts.sum())
        if not total:
            return None
        place = np.arange(total) - (np.cumsum(counts) - counts).repeat(counts)
        return Offer(counts, (FIRST_DRAFT - place).astype(np.int32))

    def proposals(self, num_rows: int, *, prompts: bool) -> int:
        if self.is_resting or not (prompts or np.count_nonzero(self._covered)):
            return NO_PROPOSER
        found = self._current(num_rows)
        return max(found, 0) if prompts and self._keeps_kv else found

    def reach(self, proposals: int) -> int:
        return self._reach(proposals)

    def _current(self, num_rows: int) -> int:
        if not self.adaptive:
            return self.most
        if self._num_timed < _FIRST_STEPS:
            return NO_PROPOSER
        found = self._ranges.get(rows_of(max(num_rows, 1)))
        return self.most if found is None else found.current

    # -- learning ---------------------------------------------------------------------------------

    @property
    def fewest_and_most(self) -> tuple[int, int]:
        """Numbers of drafts whose steps are worth timing beforehand."""
        return int(self._counts[1]), self.most

    def expect(self, times: Mapping[int, Sequence[float]]) -> None:
        """What steps of one row took before the first request: milliseconds by `Step.proposals`, which is also the number of
        drafts that were verified. Those of `NO_PROPOSER` and of two numbers of drafts must be there, several each.

        So it is known from the beginning how many drafts to try; a proposer that could not pay even if its drafts were often
        right begins with a rest.
        """
        if not self.adaptive:
            return
        known = self._ranges.setdefault(1, _Range(self.most, self._pace))
        for proposals, taken in times.items():
            for ms in taken:
                known.times.add(1 + proposals, ms)
        self._num_timed = _FIRST_STEPS
        self._choose_anew()
        if not self._may_pay(1):
            self._begin_rest(1)

    def begin(self, slot: int, job: Job) -> None:
        self._may_draft[slot] = job.may_draft
        self._covered[slot] = not (self.is_resting and self._keeps_kv)

    def learn(self, queues: Queues, slots: I64, drafts: I32, accepted: I32) -> None:
        self._per_row = 1.0 + float(accepted.sum()) / max(1, len(slots))
        had = drafts > 0
        if np.count_nonzero(had):
            self.rates.observe(rows_of(len(slots)), drafts[had], accepted[had])

    def timed(self, num_rows: int, num_tokens: int, ms: float, proposals: int) -> None:
        if not self.adaptive:
            return
        if self.is_resting and num_tokens == num_rows and (self._rested + 1) % _REST_LOOK:
            self._rested += 1
            self.budget.pass_time(1.0)
            return
        per_row, self._per_row = self._per_row, 1.0
        if self._num_timed < _FIRST_STEPS:
            self._num_timed += 1
            if self._num_timed <= _COLD_STEPS:
                return
        rows = rows_of(num_rows)
        known = self._ranges.setdefault(rows, _Range(self.most, self._pace))
        if num_tokens == num_rows * (1 + max(proposals, 0)):
            known.times.add(1 + proposals, ms)
        is_plain = proposals == NO_PROPOSER and num_tokens == num_rows
        self._pay(known, _Unpaid(1 + proposals, ms, per_row, is_plain))
        if self.is_resting:
            self._wake(num_rows, known)
        else:
            self._look(rows, known)
            self._rest(num_rows, known)

    def prompts_timed(self, ms: float, proposals: int) -> None:
        self._per_row = 1.0
        if not self.adaptive or proposals == NO_PROPOSER or not self._keeps_kv:
            return
        shares = [found for known in self._ranges.values() if (found := known.upkeep()) is not None]
        share = min(shares) if shares else self._upkeep
        self._prompts_ms += max(share - _GIVEN, 0.0) * ms

    def _pay(self, known: _Range, newest: _Unpaid) -> None:
        """Books what steps have gained or lost."""
        known.unpaid.append(newest)
        if not known.times.known(0):
            return
        plain = known.times.at_least(0)
        self.budget.lose(self._prompts_ms / plain)
        self._prompts_ms = 0.0
        for each in known.unpaid:
            took = 1.0 if each.is_plain else min(each.ms, MOST_SLOW * known.ms(each.kind)) / plain
            if not known.times.known(each.kind):
                took = min(took, _MOST_AT_FIRST)
            self.budget.pass_time(took)
            if not each.is_plain:
                self.budget.lose(took - each.per_row)
        known.unpaid.clear()

    def _look(self, rows: int, known: _Range) -> None:
        """Chooses the number of drafts, and now and then tries another one."""
        ended = False
        if known.trial is not None:
            known.trials -= 1
            if known.trials > 0:
                return
            known.trial, ended = None, True
        known.rest -= 1
        if not known.times.known(1 + known.chosen, _KNOWN_AT_FIRST):
            return
        if not known.times.known(0):
            known.plain_wait -= 1
            if known.plain_wait <= 0:
                known.begin_trial(NO_PROPOSER)
                known.plain_trials += 1
                known.plain_wait = _COMPARE_EVERY << min(known.plain_trials, 10)
            return
        if known.rest % _COMPARE_EVERY and not ended:
            return
        worth = self._worth(known, self.rates.expected(rows))
        best = int(worth.argmax())
        if worth[best] > _CLEAR_GAIN * worth[known.chosen]:
            known.chosen = best
        if known.rest <= 0 and not self.budget.is_spent:
            self._try_another(known, worth)

    def _try_another(self, known: _Range, worth: F64) -> None:
        others = worth.copy()
        others[known.chosen] = 0.0
        another = int(others.argmax())
        known.num_trials += 1
        is_plain = known.chosen > 0 and (another == 0 or known.num_trials % _PLAIN_EVERY == 0)
        known.begin_trial(NO_PROPOSER if is_plain else another)
        loss = max(worth[known.chosen] / worth[0 if is_plain else another] - 1.0, 0.0)
        known.rest = max(_LOOK_EVERY, int(_LOOK_STEPS * loss / _LOOK_LOSS))

    def _worth(self, known: _Range, expected: F64) -> F64:
        """[most + 1]: tokens a millisecond by number of drafts, where this may be chosen; without any, those of a plain
        step, since the proposer may rest."""
        worth = np.zeros(self.most + 1)
        for count in self._counts.tolist():
            worth[count] = expected[count] / known.ms(1 + count if count else 0)
        return worth

    def _rest(self, num_rows: int, known: _Range) -> None:
        """Stops a proposer that does not pay, once what it may lose is lost, or its upkeep has been paid for long."""
        self._tired = self._tired + 1 if known.chosen == 0 else 0
        if self.budget.left > _FIRST_LOSS:
            self._least_rest = _FIRST_REST
        useless = known.chosen == 0 and not self._keeps_kv
        tired = self._tired >= _TIRED_STEPS and self._upkeep > _CHEAP
        if self.budget.is_spent or useless or tired:
            self._begin_rest(num_rows)

    def _begin_rest(self, num_rows: int) -> None:
        self.is_resting, self._rested, self._slept_at, self._tired = True, 0, num_rows, 0
        if self._keeps_kv:
            self._covered[:] = False

    def _wake(self, num_rows: int, known: _Range) -> None:
        """Ends the rest, if there is something to lose, and something to gain with drafts that are often right."""
        self._rested += 1
        shrunk = num_rows * 4 <= self._slept_at
        rested = self._rested >= self._least_rest and self.budget.left >= _WAKING
        if self.budget.is_spent or not (shrunk or rested) or not known.times.known(0):
            return
        if not self._may_pay(rows_of(num_rows)):
            self._rested = 0
            return
        self.is_resting = False
        self._least_rest = min(2 * self._least_rest, _LONGEST_REST)
        self.rates.fade()
        self._choose_anew()

    def _choose_anew(self) -> None:
        """Begins with the number of drafts that promises most."""
        for rows, each in self._ranges.items():
            each.trial = None
            if each.times.known(0):
                worth = self._worth(each, self.rates.expected(rows))
                each.chosen = 1 + int(worth[1:].argmax())

    def _may_pay(self, rows: int) -> bool:
        """Would drafts that are often right pay in steps of a range? Where it was not seen there what drafts take, it goes
        by the nearest range of fewer rows: beside more rows, verifying drafts is not cheaper. Unknown: yes."""
        drafted = [each for each, known in self._ranges.items() if each <= rows and self._has_drafted(known)]
        known = self._ranges[max(drafted)] if drafted else None
        if known is None or not known.times.known(0):
            return True
        good = np.concatenate(([1.0], 1.0 + np.add.accumulate(GOOD_RATE ** np.arange(1.0, self.most + 1))))
        return int(np.argmax(self._worth(known, good))) > 0

    def _has_drafted(self, known: _Range) -> bool:
        """Is it known what drafts take?"""
        return any(known.times.known(1 + count) for count in self._counts.tolist() if count)

    def forget(self, queues: Queues, slot: int, job: Job, *, has_ended: bool) -> None:
        self._may_draft[slot] = self._covered[slot] = False
