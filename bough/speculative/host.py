"""Drafts that are guessed on the host, from tokens alone: who gets how many, and what is learned from what came of them.

A guess can be made only for a row whose tokens are all known. Where steps overlap, rows would have to wait for the step in
flight; so there are two modes. *Overlapping*, no row waits and none has drafts; a few rows are guessed for all the same, to
see whether it would pay. *Serial*, every step settles before the next is planned, and rows may have drafts. The mode is the
one that promises more tokens a millisecond.

Whatever is promised, drafts and waiting may lose a small part of the time only (`LossBudget`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bough.core.step import I32, I64, NO_PROPOSER, Bool
from bough.scheduler.drafting import Offer
from bough.scheduler.queues import Job, Queues
from bough.speculative.acceptance import F64, Acceptance
from bough.speculative.budget import MOST_SLOW, LossBudget
from bough.speculative.choose import choose
from bough.speculative.costs import VerifyCosts
from bough.speculative.guesses import NO_GUESS, Guess, Guesser

_MOST_GUESSES = 64
"""Rows that are guessed for in one step: one takes some 20 us."""
_WATCHED_GUESSES = 8
"""The same while steps overlap, where guesses are only compared with what comes."""
_MODE_STEPS = 16
"""Steps between two choices of the mode."""
_CLEAR_GAIN = 1.05
"""Factor by which the other mode must promise more tokens a second before it is taken."""
_BUBBLE_MS = 0.4
"""What waiting for a step to settle costs, as long as it was not measured."""
_GAIN_WEIGHT = 0.25
"""Of the newest guess, in what is expected of a row's next."""
_LOSS, _FIRST_LOSS, _MOST_GAIN, _MOST_DEBT, _AGAIN = 0.007, 2.0, 32.0, 8.0, 0.5
"""Of `LossBudget`: drafts from tokens alone shall never cost more than 2 %."""
_REST_LOOK = 8
"""Of as many steps in which it rests, one is timed."""
_NOTHING: F64 = np.empty(0, np.float64)


class HostDrafter:
    """A `scheduler.drafting.Drafter` over a guesser. `adaptive`: only drafts that pay; otherwise all that are guessed."""

    @property
    def is_resting(self) -> bool:
        """Where nothing is left to lose, and steps would not overlap without it either: asking it takes time, too."""
        return self._adaptive and self.budget.is_spent and not self._overlaps

    def __init__(
        self,
        guesser: Guesser,
        num_slots: int,
        *,
        overlaps: bool,
        adaptive: bool,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock`: seconds that this thread has computed."""
        self.guesser = guesser
        self._clock = clock
        self._adaptive = adaptive
        self._overlaps = overlaps
        self.serial = not overlaps or not adaptive
        self.costs = VerifyCosts()
        prior = guesser.prior
        self.acceptance = Acceptance(len(prior), guesser.most, prior, num_slots)
        self._may_draft = np.zeros(num_slots, np.bool_)
        self._namespace: dict[int, str] = {}
        self._guesses: dict[int, tuple[int, Guess]] = {}
        """Slot -> how much of the row was known when it was guessed for, and the guess."""
        self._gain = np.zeros(num_slots)
        """By slot: how much of late guesses was right, in tokens a step."""
        self.budget = LossBudget(_LOSS, first=_FIRST_LOSS, most=_MOST_GAIN, debt=_MOST_DEBT, again=_AGAIN)
        self._unpaid: tuple[int, int, float] | None = None
        """Of the newest step: its rows, its drafts and the tokens that a row got, until it is paid for."""
        self._own_s = 0.0
        """Time of the thread that guessing and comparing took, until it is paid for: steps are not timed with it."""
        self._rested = 0
        """Steps in which it rested."""
        self._steps = 0
        self._turn = 0

    # -- planning ---------------------------------------------------------------------------------

    def waits(self, queues: Queues, slots: I64) -> Bool:
        if not self.serial:
            return np.zeros(len(slots), np.bool_)
        return self._may_draft[slots]

    def offer(self, queues: Queues, slots: I64, most: I32, num_tokens: int) -> Offer | None:
        if not self.serial:
            return None
        if self._adaptive and (self.budget.is_spent or not self.costs.knows_plain(len(slots))):
            return None
        began_s = self._clock()
        offer = self._offer(queues, slots, most, num_tokens)
        self._own_s += self._clock() - began_s
        return offer

    def _offer(self, queues: Queues, slots: I64, most: I32, num_tokens: int) -> Offer | None:
        guesses: list[Guess] = []
        survival: list[F64] = []
        left = _MOST_GUESSES
        for slot, limit in zip(slots.tolist(), most.tolist(), strict=True):
            guess = NO_GUESS
            if left and limit > 0 and self._may_draft[slot] and not queues.in_flight(slot):
                guess = self._guess(queues, slot)
                left -= 1
            count = min(limit, len(guess.tokens))
            guesses.append(guess)
            rates = self.acceptance.rates(guess.kind, slot, count) if count else _NOTHING
            survival.append(np.multiply.accumulate(rates))
        counts = self._counts(survival, num_tokens)
        if not counts.any():
            return None
        tokens = np.concatenate([guess.tokens[:count] for guess, count in zip(guesses, counts.tolist(), strict=True)])
        return Offer(counts, tokens.astype(np.int32))

    def proposals(self, num_rows: int, *, prompts: bool) -> int:
        return NO_PROPOSER

    def reach(self, proposals: int) -> int:
        return 0

    def _counts(self, survival: list[F64], num_tokens: int) -> I32:
        num_rows = len(survival)
        if self._adaptive:
            num_tokens = min(num_tokens, self.costs.most_tokens(num_rows) - num_rows)
            return choose(
                survival, num_tokens, lambda count: self.costs.of(num_rows, num_rows + count, serial=self.serial)
            )
        counts = np.array([len(each) for each in survival], np.int32)
        counts[np.cumsum(counts) > num_tokens] = 0
        return counts

    def _guess(self, queues: Queues, slot: int) -> Guess:
        """What may follow a row's known tokens. Made once for each of its states."""
        known = int(queues.slots.known[slot])
        made = self._guesses.get(slot)
        if made is None or made[0] != known:
            text = queues.slots.history[slot, :known]
            made = self._guesses[slot] = known, self.guesser.guess(text, self._namespace[slot])
        return made[1]

    # -- learning ---------------------------------------------------------------------------------

    def begin(self, slot: int, job: Job) -> None:
        self._may_draft[slot] = job.may_draft
        self._namespace[slot] = job.ask.namespace
        self._guesses.pop(slot, None)
        self._gain[slot] = 0.0
        self.acceptance.begin(slot)

    def learn(self, queues: Queues, slots: I64, drafts: I32, accepted: I32) -> None:
        cost = queues.cost
        if cost.decode_ms > 0.0 and cost.prefill_token_ms > 0.0:
            self.costs.slope = min(1.0, cost.prefill_token_ms / cost.decode_ms)
        self._pay()
        if len(slots):
            self._unpaid = len(slots), int(drafts.sum()), 1.0 + float(accepted.sum()) / len(slots)
        if self.serial:
            self._gain[slots] *= 1.0 - _GAIN_WEIGHT
        began_s = self._clock()
        for slot in slots.tolist():
            if slot in self._guesses:
                self._compare(queues, slot)
        self._own_s += self._clock() - began_s
        if self._overlaps and self._adaptive:
            if not self.serial:
                self._watch(queues, slots)
            self._steps += 1
            if self._steps % _MODE_STEPS == 0:
                self._choose_mode(queues)

    def _compare(self, queues: Queues, slot: int) -> None:
        """Was the guess right, drafted or not? It is looked at as soon as enough of what came is known."""
        known, guess = self._guesses[slot]
        said = queues.slots.history[slot, known : int(queues.slots.known[slot])]
        count = min(len(said), len(guess.tokens))
        if not count:
            if len(said):
                del self._guesses[slot]
            return
        right = said[:count] == guess.tokens[:count]
        num_right = count if right.all() else int(right.argmin())
        if num_right == count and count < len(guess.tokens) and not self.serial:
            return  # right so far, and more of it is to come
        self.acceptance.observe(guess.kind, slot, num_right, count)
        if not self.serial:
            self._gain[slot] *= 1.0 - _GAIN_WEIGHT
        self._gain[slot] += _GAIN_WEIGHT * num_right
        del self._guesses[slot]

    def _watch(self, queues: Queues, slots: I64) -> None:
        """Guesses for some of the rows, by turns, though nothing will be drafted."""
        candidates = slots[self._may_draft[slots]]
        if not len(candidates):
            return
        self._turn += _WATCHED_GUESSES
        some = np.arange(self._turn, self._turn + min(_WATCHED_GUESSES, len(candidates))) % len(candidates)
        for slot in candidates[some].tolist():
            if slot in self._guesses or not queues.slots.live[slot]:
                continue
            if not len(self._guess(queues, slot).tokens):
                self._gain[slot] *= 1.0 - _GAIN_WEIGHT

    def _choose_mode(self, queues: Queues) -> None:
        """Serial, if rows would yield more a millisecond with what drafts have promised of late."""
        slots = queues.running_slots()
        num_rows = len(slots)
        if not num_rows:
            return
        gain = float(self._gain[slots].sum())
        num_drafts = int(min(4.0 * gain, num_rows * self.guesser.most))
        plain = num_rows / self.costs.of(num_rows, num_rows, serial=False)
        took = self.costs.of(num_rows, num_rows + num_drafts, serial=True)
        if not self.costs.knows(num_rows, serial=True):
            took += _BUBBLE_MS
        drafted = (num_rows + gain) / took
        if self.serial:
            self.serial = drafted * _CLEAR_GAIN > plain and not self.budget.is_spent
        else:
            self.serial = drafted > _CLEAR_GAIN * plain and not self.budget.is_spent

    def timed(self, num_rows: int, num_tokens: int, ms: float, proposals: int) -> None:
        if self.is_resting and self._unpaid is None:
            self.budget.pass_time(1.0)
            self._rested += 1
            if self._rested % _REST_LOOK:
                return
        self.costs.add(num_rows, num_tokens, ms, serial=self.serial)
        self._pay(ms)
        if self.serial and self.costs.knows_plain(num_rows):
            self.budget.lose(1e3 * self._own_s / self.costs.plain(num_rows, serial=not self._overlaps))
        self._own_s = 0.0

    def prompts_timed(self, ms: float, proposals: int) -> None:
        """Prompts are computed without it."""

    def _pay(self, ms: float | None = None) -> None:
        """Books what the newest step has gained or lost. `ms`: what it took; None: as long as others of its kind."""
        if self._unpaid is None:
            return
        (num_rows, num_drafts, per_row), self._unpaid = self._unpaid, None
        plain = self.costs.plain(num_rows, serial=not self._overlaps)
        usual = self.costs.of(num_rows, num_rows + num_drafts, serial=self.serial)
        took = (usual if ms is None else min(ms, MOST_SLOW * usual)) / plain
        self.budget.pass_time(took)
        if num_drafts or (self.serial and self._overlaps):
            self.budget.lose(took - per_row)
        if self.budget.is_spent and self._overlaps and self._adaptive:
            self.serial = False

    def forget(self, queues: Queues, slot: int, job: Job, *, has_ended: bool) -> None:
        self._guesses.pop(slot, None)
        self._may_draft[slot] = False
        if has_ended and job.may_draft:
            known = int(queues.slots.known[slot])
            self.guesser.add(queues.slots.history[slot, :known].copy(), len(job.prompt), job.ask.namespace)
