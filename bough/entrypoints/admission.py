"""How much work is let in: bounded by requests and by prompt tokens, decided before anything is tokenised.

A request holds its place from admission to its end; its prompt counts against the token bound until its first token is out
(from then on the engine holds its pages and it no longer waits for anything). Work over the bound gets 429 and a hint when
to come back, computed from how fast requests have been ending.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from bough.core.errors import Overloaded


class Place:
    """One admitted request's hold on the bounds. `began` and `end` may be called any number of times."""

    __slots__ = ("_admission", "_requests", "_tokens")

    def __init__(self, admission: Admission, requests: int, tokens: int) -> None:
        self._admission = admission
        self._requests = requests
        self._tokens = tokens

    def began(self) -> None:
        """The first token is out."""
        if self._tokens:
            self._admission.waiting_tokens -= self._tokens
            self._tokens = 0
            self._admission.tell()

    def end(self) -> None:
        """The request has ended, however it did."""
        self.began()
        if self._requests:
            self._admission.left(self._requests)
            self._requests = 0


class Admission:
    """The bounds of one API worker (the server's, divided by the number of workers)."""

    def __init__(self, *, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_requests`: running and queued together. `max_tokens`: prompt tokens that wait for their first token."""
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.waiting_tokens = 0
        self.refused = 0
        self.changed: Callable[[int, int], None] | None = None
        """Hears the waiting tokens and the refusals so far, whenever they change."""
        self._clock = clock
        self._seconds_per_end = 0.0
        self._last_end = clock()

    def admit(self, *, requests: int, tokens: int) -> Place:
        """A place for `requests` completions of `tokens` prompt tokens together, or `Overloaded`.

        A lone request is admitted whatever its size: whether it fits is the engine's to say.
        """
        over_requests = self.requests + requests > self.max_requests
        over_tokens = self.waiting_tokens + tokens > self.max_tokens
        if self.requests and (over_requests or over_tokens):
            self.refused += 1
            self.tell()
            raise self._overloaded(over_requests)
        self.requests += requests
        self.waiting_tokens += tokens
        self.tell()
        return Place(self, requests, tokens)

    def tell(self) -> None:
        if self.changed is not None:
            self.changed(self.waiting_tokens, self.refused)

    def left(self, requests: int) -> None:
        """Called by places: so many requests have ended."""
        self.requests -= requests
        now = self._clock()
        per_end = (now - self._last_end) / requests
        self._last_end = now
        self._seconds_per_end += 0.1 * (per_end - self._seconds_per_end)

    def retry_after_s(self) -> int:
        """When a tenth of what is queued should be done, at the pace of late; between 1 and 60 seconds."""
        return min(60, max(1, math.ceil(self._seconds_per_end * self.requests / 10)))

    def _overloaded(self, by_requests: bool) -> Overloaded:
        if by_requests:
            why = f"{self.requests} requests are queued or running, {self.max_requests} are allowed"
        else:
            why = f"{self.waiting_tokens} prompt tokens are queued, {self.max_tokens} are allowed"
        error = Overloaded(
            what="the server is busy",
            why=why,
            fix=f"try again in {self.retry_after_s()} s, or raise --max-queued-requests or --max-queued-tokens",
        )
        error.retry_after_s = self.retry_after_s()
        return error
