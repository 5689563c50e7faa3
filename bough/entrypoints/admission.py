"""Admission control: limits requests, prompt tokens and the expected waiting time, before anything is tokenised.

A request counts from admission to its end; its prompt counts against the token limit until its first token is sent
(from then on it has its memory and no longer waits). How long a new request would wait follows from the engine's
heartbeat: how many wait already, and how fast waiting requests have recently begun. Requests above a limit get 429 with
`Retry-After`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from bough.core.errors import Overloaded
from bough.observability.health import Beat

_LOOK_EVERY_S = 0.1
_HALF_LIFE_S = 20.0
"""Seconds over which the rate is averaged: a change of the load has an effect within this time."""
_LEAST_BUSY_S = 3.0
"""Seconds after the start before which the rate is unknown: a burst right after the start is only subject to the other
limits."""
_MOST_BETWEEN_S = 5.0
"""Seconds. If two readings are further apart, it is unknown whether requests were waiting in between."""


class Pace:
    """The rate at which waiting requests start, measured from the engine's heartbeat."""

    def __init__(self, look: Callable[[], Beat], clock: Callable[[], float]) -> None:
        self._look = look
        self._clock = clock
        self._looked_s = -_MOST_BETWEEN_S
        self._waiting = 0
        self._begun = 0
        self._busy_s = 0.0
        self._starts = 0.0
        self._sent = 0
        """Requests admitted since the last reading, which the engine may not have counted yet."""

    def sent(self, requests: int) -> None:
        self._sent += requests

    def expected_s(self) -> float:
        """Expected seconds that a new request would wait; 0 if unknown."""
        now = self._clock()
        if now - self._looked_s >= _LOOK_EVERY_S:
            self._observe(now)
        if self._busy_s < _LEAST_BUSY_S or not self._waiting:
            return 0.0
        return (self._waiting + self._sent) * self._busy_s / max(self._starts, 1.0)

    def _observe(self, now: float) -> None:
        beat = self._look()
        passed = now - self._looked_s
        if passed < _MOST_BETWEEN_S:
            kept = 0.5 ** (passed / _HALF_LIFE_S)
            self._busy_s *= kept
            self._starts *= kept
            if self._waiting and beat.num_waiting:
                self._busy_s += passed
                self._starts += max(0, beat.num_begun - self._begun)
        self._looked_s, self._waiting, self._begun, self._sent = now, beat.num_waiting, beat.num_begun, 0


class AdmissionHold:
    """One admitted request's share of the limits. `began` and `end` may be called any number of times."""

    __slots__ = ("_admission", "_requests", "_tokens")

    def __init__(self, admission: Admission, requests: int, tokens: int) -> None:
        self._admission = admission
        self._requests = requests
        self._tokens = tokens

    def began(self) -> None:
        """The first token was sent."""
        if self._tokens:
            self._admission.waiting_tokens -= self._tokens
            self._tokens = 0
            self._admission.tell()

    def end(self) -> None:
        """The request has ended, for any reason."""
        self.began()
        if self._requests:
            self._admission.left(self._requests)
            self._requests = 0


class Admission:
    """The limits of one API worker (the server's, divided by the number of workers)."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        max_wait_s: float = 0.0,
        look: Callable[[], Beat] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_requests`: running and queued together. `max_tokens`: prompt tokens that wait for their first token.
        `max_wait_s`: maximum expected wait; 0: no limit. `look` reads the engine's heartbeat."""
        self.max_requests = max_requests
        self.max_wait_s = max_wait_s
        self._pace = Pace(look, clock) if look is not None and max_wait_s > 0 else None
        self.max_tokens = max_tokens
        self.requests = 0
        self.waiting_tokens = 0
        self.refused = 0
        self.changed: Callable[[int, int], None] | None = None
        """Called with the waiting tokens and the number of refusals whenever they change."""
        self._clock = clock
        self._seconds_per_end = 0.0
        self._last_end = clock()

    def admit(self, *, requests: int, tokens: int) -> AdmissionHold:
        """Admits `requests` completions with `tokens` prompt tokens in total, or raises `Overloaded`. A single request
        is admitted regardless of its size: the engine decides whether it fits.
        """
        over_requests = self.requests + requests > self.max_requests
        over_tokens = self.waiting_tokens + tokens > self.max_tokens
        wait_s = self._pace.expected_s() if self._pace is not None else 0.0
        if self.requests and (over_requests or over_tokens or wait_s > self.max_wait_s):
            self.refused += 1
            self.tell()
            raise self._overloaded(over_requests, over_tokens, wait_s)
        if self._pace is not None:
            self._pace.sent(requests)
        self.requests += requests
        self.waiting_tokens += tokens
        self.tell()
        return AdmissionHold(self, requests, tokens)

    def tell(self) -> None:
        if self.changed is not None:
            self.changed(self.waiting_tokens, self.refused)

    def left(self, requests: int) -> None:
        """Called by admissions: this number of requests has ended."""
        self.requests -= requests
        now = self._clock()
        per_end = (now - self._last_end) / requests
        self._last_end = now
        self._seconds_per_end += 0.1 * (per_end - self._seconds_per_end)

    def retry_after_s(self) -> int:
        """Seconds until a tenth of the queue should be done, at the recent rate; between 1 and 60."""
        return min(60, max(1, math.ceil(self._seconds_per_end * self.requests / 10)))

    def _overloaded(self, by_requests: bool, by_tokens: bool, wait_s: float) -> Overloaded:
        retry_s = self.retry_after_s()
        if by_requests:
            why = f"{self.requests} requests are queued or running, {self.max_requests} are allowed"
            flag = "--max-queued-requests"
        elif by_tokens:
            why = f"{self.waiting_tokens} prompt tokens are queued, {self.max_tokens} are allowed"
            flag = "--max-queued-tokens"
        else:
            why = f"a request would wait about {wait_s:.0f} s at the recent pace, {self.max_wait_s:g} s are allowed"
            flag, retry_s = "--max-queue-wait-s", max(retry_s, min(60, math.ceil(wait_s - self.max_wait_s)))
        error = Overloaded(
            what="the server is busy", why=why, fix=f"try again in {retry_s} s; the operator may raise {flag}"
        )
        error.retry_after_s = retry_s
        return error
