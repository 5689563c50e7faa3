"""Background tasks that must keep running: one that fails is logged, restarted after a pause, and reported until it
runs again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)

_PAUSE_S = (0.5, 30.0)
"""Seconds before a failed task is restarted: after its first failure, and at most. Each further failure in a row
doubles the pause."""
_WELL_AFTER_S = 10.0
"""Seconds without a failure after which a task counts as healthy again. Every task runs at least once per second, so
that a lack of descriptors or disk space that persists causes another failure within this time."""


class _Kept:
    __slots__ = ("failed_s", "failures", "running", "task")

    def __init__(self) -> None:
        self.failures = 0
        """Consecutive failures."""
        self.failed_s = 0.0
        self.running = True
        self.task: asyncio.Task[None] | None = None


class Keeper:
    """The background tasks of one event loop, by name."""

    def __init__(
        self, failed: Callable[[str], None] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`failed` is called with the name of a task each time it fails."""
        self.failed = failed
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Runs `work` until it returns or its task is cancelled; if it raises, it is run again."""
        kept = self._kept[name] = _Kept()
        kept.task = asyncio.ensure_future(self._run(name, kept, work))
        return kept.task

    def stumbled(self, name: str, error: BaseException) -> float:
        """Records and logs a failure of a task. Returns the seconds to wait before the next attempt.

        For tasks that restart themselves; `keep` calls it for the others.
        """
        kept = self._kept.setdefault(name, _Kept())
        now = self._clock()
        kept.failures = kept.failures + 1 if now - kept.failed_s < _PAUSE_S[1] + _WELL_AFTER_S else 1
        kept.failed_s = now
        pause_s: float = min(_PAUSE_S[1], _PAUSE_S[0] * 2 ** min(kept.failures - 1, 10))
        _log.error("the background task %r failed, and is tried again in %g s", name, pause_s, exc_info=error)
        if self.failed is not None:
            self.failed(name)
        return pause_s

    def troubles(self) -> dict[str, str]:
        """Tasks that have failed and do not count as healthy again, with a sentence each."""
        now = self._clock()
        return {
            name: f"failed {kept.failures} times in a row and is tried again; the log says why"
            for name, kept in self._kept.items()
            if kept.failures and (not kept.running or now - kept.failed_s < _WELL_AFTER_S)
        }

    async def close(self) -> None:
        """Cancels all tasks and waits for their ends."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: str, kept: _Kept, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            kept.running = True
            try:
                await work()
                return
            except Exception as error:
                kept.running = False
                pause_s = self.stumbled(name, error)
            await asyncio.sleep(pause_s)
