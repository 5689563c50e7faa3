"""Runs many programs: limits concurrency, and returns their states in order."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from bough.lang.errors import LangError

M = TypeVar("M")
R = TypeVar("R")


def thread_count(num_threads: int | str, num_members: int, auto: int | None = None) -> int:
    """How many programs run at a time; "auto" allows for programs that mostly wait."""
    if num_threads == "auto":
        wanted = auto if auto is not None else max(96, (os.cpu_count() or 1) * 16)
    elif isinstance(num_threads, int) and not isinstance(num_threads, bool) and num_threads >= 1:
        wanted = num_threads
    else:
        raise LangError(
            what=f"num_threads is {num_threads!r}",
            why="it says how many programs run at a time",
            fix='pass "auto", or 1 or more',
        )
    return max(1, min(wanted, num_members))


def in_order(
    start: Callable[[M], Future[R]], members: Sequence[M], window: int, progress: BatchProgress | None
) -> Iterator[R]:
    """Yield the results in the members' order, starting `window` members at most ahead of the one yielded next."""
    running: deque[Future[R]] = deque()
    waiting = deque(members)
    try:
        while waiting or running:
            while waiting and len(running) < window:
                future = start(waiting.popleft())
                if progress is not None:
                    future.add_done_callback(progress.step)
                running.append(future)
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


class BatchProgress:
    """A line on the terminal that counts finished programs."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def step(self, _: object = None) -> None:
        with self._lock:
            self._done += 1
            end = "\n" if self._done == self._total else ""
            sys.stderr.write(f"\r{self._done}/{self._total} programs{end}")
            sys.stderr.flush()
