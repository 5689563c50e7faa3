"""One event loop, in one thread, shared by all synchronous programs of this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from bough.lang.errors import LangError

T = TypeVar("T")


class _LoopThread:
    """Starts its loop on first use, and a new one in a child process made by `os.fork`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop = asyncio.new_event_loop()
                self._pid = os.getpid()
                self._thread = threading.Thread(target=self._loop.run_forever, name="bough-lang", daemon=True)
                self._thread.start()
            return self._loop

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread


_shared = _LoopThread()


def shared_loop() -> asyncio.AbstractEventLoop:
    return _shared.loop()


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the shared loop and waits for it. Raises on the loop's own thread, which would wait for
    itself."""
    if _shared.is_current():
        work.close()
        raise LangError(
            what="a blocking call inside an async program",
            why="it would stop the event loop that all programs run on",
            fix="use the awaitable form: `await f.arun(...)`, `await s`, `await s.aget(name)`",
        )
    future = asyncio.run_coroutine_threadsafe(work, shared_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def on_loop_thread(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller runs inside `loop` right now."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class Once(Generic[T]):
    """A value computed by one asynchronous call for all concurrent callers; after a failure the next caller tries
    again."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._value: list[T] = []
        self._pending: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[T]] = WeakKeyDictionary()

    async def get(self) -> T:
        if self._value:
            return self._value[0]
        loop = asyncio.get_running_loop()
        pending = self._pending.get(loop)
        if pending is None:
            pending = asyncio.ensure_future(self._make())
            self._pending[loop] = pending
        try:
            value = await asyncio.shield(pending)
        except BaseException:
            if pending.done():
                self._pending.pop(loop, None)
            raise
        self._value = [value]
        return value

    def peek(self) -> T | None:
        """The value if it is known already."""
        return self._value[0] if self._value else None


def settle(future: Future[None]) -> None:
    """Complete a waiter's future unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_result(None)
