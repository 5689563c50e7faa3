"""Drafters beside streams of tokens that are made up: what steps take, how many drafts are right, and noise are given, so
that it can be told exactly what drafting has won or lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from bough.core.step import I32, NO_PROPOSER
from bough.speculative.acceptance import F64
from bough.speculative.device import DeviceDrafter
from bough.speculative.guesses import NO_GUESS, Guess
from bough.speculative.host import HostDrafter

Right = Callable[[int, random.Random], int]
"""Position of a text -> how many drafts in a row are right there."""
Noise = Callable[[int, random.Random], float]
"""Number of a step -> what its time is multiplied by."""


def drawn(*rates: float) -> Right:
    """Each draft is right at its place's rate; the last rate is that of all later places."""

    def right(at: int, rng: random.Random) -> int:
        count = 0
        while count < 64 and rng.random() < rates[min(count, len(rates) - 1)]:
            count += 1
        return count

    return right


def by_turns(period: int, first: Right, second: Right) -> Right:
    return lambda at, rng: (first if at // period % 2 == 0 else second)(at, rng)


def drifting(first: float, last: float, over: int) -> Right:
    """A rate that goes from one value to another."""

    def right(at: int, rng: random.Random) -> int:
        rate = first + (last - first) * min(at / over, 1.0)
        return drawn(rate)(at, rng)

    return right


def quiet(step: int, rng: random.Random) -> float:
    return 1.0


def noisy(step: int, rng: random.Random) -> float:
    return rng.uniform(0.7, 1.3)


def bursts(step: int, rng: random.Random) -> float:
    """Another program comes and goes, and now and then something takes very long."""
    busy = 1.3 if step // 60 % 2 else 1.0
    return busy * rng.uniform(0.85, 1.15) * (8.0 if rng.random() < 0.01 else 1.0)


class Result:
    """Of a run: its time, and that of the same tokens one by one."""

    def __init__(self, plain_ms: float) -> None:
        self._plain_ms = plain_ms
        self.tokens = 0
        self.ms = 0.0
        self.other_ms = 0.0
        """Of prompts, with and without drafts."""

    def add(self, ms: float, tokens: float) -> None:
        self.ms += ms
        self.tokens += tokens

    @property
    def speed(self) -> float:
        """Beside a run without drafts."""
        return (self.tokens * self._plain_ms + self.other_ms) / self.ms


class HostStream:
    """One row after the other, guessed for on the host."""

    most = 11
    prior: F64 = np.array([0.5, 0.2])

    def __init__(
        self,
        right: Right,
        *,
        token_ms: Callable[[int], float],
        noise: Noise,
        overlaps: bool = False,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`token_ms`: of a step, by its tokens. Without overlap it takes 5 % more. `clock`: of the drafter."""
        self._right = right
        self._token_ms = token_ms
        self._noise = noise
        self._rng = random.Random(5)
        self._overlaps = overlaps
        self._num_right: list[int] = []
        self.drafter = HostDrafter(self, 1, overlaps=overlaps, adaptive=True, clock=clock)  # type: ignore[arg-type]
        self._length = 600
        history = np.zeros((1, self._length + 64), np.int32)
        self._slots = SimpleNamespace(known=np.zeros(1, np.int32), history=history, live=np.ones(1, np.bool_))
        self._queues: Any = SimpleNamespace(
            slots=self._slots,
            in_flight=lambda slot: not self.drafter.serial,
            running_slots=lambda: np.zeros(1, np.int64),
            cost=SimpleNamespace(decode_ms=token_ms(1), prefill_token_ms=token_ms(1) * 0.05),
        )

    def guess(self, text: I32, namespace: str) -> Guess:
        at = self._base + len(text)
        right = self._right_at(at)
        if right < 0:
            return NO_GUESS
        truth = self._truth(at, self.most)
        truth[right:] += 1
        return Guess(truth, at * 2654435761 >> 7 & 1)

    def add(self, text: I32, num_prompt: int, namespace: str) -> None:
        pass

    def _right_at(self, at: int) -> int:
        while len(self._num_right) <= at:
            self._num_right.append(self._right(len(self._num_right), self._rng))
        return self._num_right[at]

    @staticmethod
    def _truth(at: int, count: int) -> I32:
        return ((np.arange(at, at + count) * 7919) % 30011 * 2).astype(np.int32)

    def run(self, tokens: int) -> Result:
        result, self._base, number = Result(self._step_ms(1, serial=not self._overlaps)), 0, 0
        slots = np.zeros(1, np.int64)
        job: Any = SimpleNamespace(may_draft=True, ask=SimpleNamespace(namespace=""), prompt=[])
        while result.tokens < tokens:
            self.drafter.begin(0, job)
            self._slots.known[0] = 1
            while (known := int(self._slots.known[0])) < self._length:
                self.drafter.waits(self._queues, slots)
                offer = self.drafter.offer(self._queues, slots, np.array([63], np.int32), 1000)
                drafts = 0 if offer is None else int(offer.counts[0])
                said = self._truth(self._base + known, drafts + 1)
                right = 0
                while offer is not None and right < drafts and offer.tokens[right] == said[right]:
                    right += 1
                self._slots.history[0, known : known + right + 1] = said[: right + 1]
                self._slots.known[0] += right + 1
                ms = self._step_ms(1 + drafts, serial=self.drafter.serial)
                told = ms * self._noise(number, self._rng)
                self.drafter.learn(self._queues, slots, np.array([drafts], np.int32), np.array([right], np.int32))
                self.drafter.timed(1, 1 + drafts, told, NO_PROPOSER)
                result.add(ms, 1 + right)
                number += 1
            self.drafter.forget(self._queues, 0, job, has_ended=False)
            self._base += self._length
        return result

    def _step_ms(self, tokens: int, *, serial: bool) -> float:
        return self._token_ms(tokens) * (1.05 if serial and self._overlaps else 1.0)


class DeviceStream:
    """Requests of some rows each, drafted for on the device."""

    def __init__(
        self,
        right: Right,
        *,
        most: int,
        step_ms: Callable[[int, int], float],
        rows: int = 1,
        prompt_ms: float = 0.0,
        noise: Noise = quiet,
        length: int = 100,
        **options: Any,
    ) -> None:
        """`step_ms`: by drafts of a row that are verified, and `Step.proposals`. `prompt_ms`: of a prompt, without the
        proposer. `length`: tokens of a request."""
        self._right, self._noise, self._step_ms = right, noise, step_ms
        self._prompt_ms, self._length, self._rows = prompt_ms, length, rows
        self._rng = random.Random(3)
        self.drafter = DeviceDrafter(most, rows, adaptive=True, reach=lambda count: count, **options)
        self.chosen: list[int] = []

    def run(self, tokens: int) -> Result:
        """Tokens of a row."""
        drafter, rows = self.drafter, np.arange(self._rows)
        plain = self._step_ms(0, NO_PROPOSER)
        result, number = Result(plain), 0
        job: Any = SimpleNamespace(may_draft=True)
        upkeep = self._step_ms(0, 0) / plain
        while result.tokens < tokens:
            left = drafter.proposals(0, prompts=True)
            for slot in range(self._rows):
                drafter.begin(slot, job)
            ms = self._prompt_ms * (upkeep if left >= 0 else 1.0)
            drafter.prompts_timed(ms, left)
            result.add(ms, 0)
            result.other_ms += self._prompt_ms
            said = 0.0
            while said < self._length:
                proposals = drafter.proposals(self._rows, prompts=False)
                proposed = np.full(self._rows, max(left, 0), np.int32)
                queues: Any = SimpleNamespace(slots=SimpleNamespace(num_proposed=proposed))
                offer = drafter.offer(queues, rows, np.full(self._rows, 99, np.int32), 10_000)
                drafts = np.zeros(self._rows, np.int32) if offer is None else offer.counts
                at = int(result.tokens)
                right = [min(int(count), self._right(at, self._rng) if count else 0) for count in drafts]
                accepted = np.array(right, np.int32)
                ms = self._step_ms(int(drafts.max()), proposals)
                drafter.learn(queues, rows, drafts, accepted)
                num_tokens = self._rows + int(drafts.sum())
                drafter.timed(self._rows, num_tokens, ms * self._noise(number, self._rng), proposals)
                per_row = 1 + float(accepted.mean())
                result.add(ms, per_row)
                said += per_row
                left = proposals
                number += 1
                self.chosen.append(proposals)
            for slot in range(self._rows):
                drafter.forget(queues, slot, job, has_ended=True)
        return result
