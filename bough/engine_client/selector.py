"""The selector of an event loop that runs in the thread of a waiting caller."""

from __future__ import annotations

import selectors
import time
from typing import TypeAlias

_LOOK_EVERY = 4
"""Iterations of the loop: while callbacks are ready, sockets are polled only once per this many iterations."""
_LATE_S = 0.001
"""Seconds. If polls of a busy wait are further apart than this, its processor is shared: it sleeps instead, because the
kernel wakes a sleeping thread ahead of those that compute."""

Ready: TypeAlias = list[tuple[selectors.SelectorKey, int]]


class CallerSelector(selectors.EpollSelector):
    """Calls the kernel seldom: a call takes a few iterations of the loop, most of which only run callbacks that are
    ready. Waits are busy for the time that `stay_awake` sets: a sleeping thread is woken late, and the CPU caches are
    then cold.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_unasked = 0
        self._awake_until_s = 0.0

    def stay_awake(self, seconds: float) -> None:
        """Makes waits busy for this many seconds from now, or until other threads want the CPU; 0: waits sleep at
        once."""
        self._awake_until_s = time.monotonic() + seconds if seconds > 0 else 0.0

    def select(self, timeout: float | None = None) -> Ready:
        if timeout is not None and timeout <= 0:
            self._num_unasked += 1
            if self._num_unasked < _LOOK_EVERY:
                return []
        self._num_unasked = 0
        if self._awake_until_s and (timeout is None or timeout > 0):
            now_s = time.monotonic()
            give_up_s = float("inf") if timeout is None else now_s + timeout
            while now_s < min(self._awake_until_s, give_up_s):
                ready = super().select(0)
                if ready:
                    return ready
                before_s, now_s = now_s, time.monotonic()
                if now_s - before_s > _LATE_S:
                    self._awake_until_s = 0.0
            if timeout is not None:
                timeout = max(0.0, give_up_s - now_s)
        return super().select(timeout)
