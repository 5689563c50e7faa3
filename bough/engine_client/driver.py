"""Runs an event loop that serves calls from threads, either in the thread that waits for an answer or in a background
thread. A single call that runs the loop in its own thread needs no thread switches. While calls overlap, are cancelled
or come from coroutines, the background thread runs the loop for all of them.
"""

from __future__ import annotations

import _signal
import asyncio
import concurrent.futures
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from bough.core.errors import Unavailable
from bough.engine_client.selector import CallerSelector

T = TypeVar("T")

_LINGER_S = 0.1
"""Seconds for which the background thread keeps running the loop after its last call, so that cancelled work can end,
unless a single caller takes over the loop."""
_END_S = 2.0
"""Seconds that remaining work has to end when the loop is closed."""


class DriverClosed(Unavailable):
    """The loop was closed before the work had ended."""

    def __init__(self) -> None:
        super().__init__(what="the engine was shut down", fix="make a new Engine")


class Driver:
    """An event loop and its threads. All methods may be called from any thread, `run` also within another loop.

    Not in a process that was forked meanwhile: the loop's descriptors are the parent's, too.
    """

    def __init__(self, name: str, *, busy_s: float = 0.0) -> None:
        """`busy_s`: a thread that runs the loop itself polls for the first `busy_s` seconds of its call, then it sleeps."""
        self._selector = CallerSelector()
        self._busy_s = busy_s
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop(self._selector)
        self._lock = threading.Lock()
        self._turning = False
        """A caller runs the loop, or is about to."""
        self._background = False
        """The background thread runs the loop."""
        self._calls = 0
        """Calls that were submitted and are not done."""
        self._closed = False
        self._lingers_no_more = threading.Condition(self._lock)
        """Notified when `_lingers` may have become false."""
        self._wanted = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._turn_in_background, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the loop and returns what it returns. If the wait is interrupted, the work is cancelled."""
        if self._claim():
            return self._run_here(work)
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begins `work` in the loop. Raises `DriverClosed` once closed, because no thread would run it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._closed:
                work.close()
                raise DriverClosed
            self._calls += 1
            self._lingers_no_more.notify_all()
            self.loop.call_soon_threadsafe(self._begin, work, future)
        self._turn_if_nobody_does()
        return future

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Calls back in the loop; at the latest before whatever runs next. Does nothing once closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *arguments)
        self._turn_if_nobody_does()

    def close(self, wait_s: float) -> None:
        """Ends the threads and the loop. Calls that wait raise `DriverClosed`, and so do later ones."""
        with self._lock:
            if self._closed:
                return
            self._closed = True  # before the stop: a thread that is stopped by it asks why
            self._lingers_no_more.notify_all()
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._wanted.release()
        self._thread.join(wait_s)

    # -- in the caller's thread --------------------------------------------------------------------------------------

    def _claim(self) -> bool:
        """Whether the calling thread should run the loop."""
        if asyncio._get_running_loop() is not None:
            return False  # a thread runs one loop at a time
        with self._lock:
            if self._lingers():  # calls that follow one another closely would never find it at rest
                self.loop.call_soon_threadsafe(self._leave)
                self._lingers_no_more.wait_for(lambda: not self._lingers())
            if self._turning or self._closed:
                return False
            self._turning = True
            return True

    def _run_here(self, work: Coroutine[Any, Any, T]) -> T:
        task = self.loop.create_task(work)
        try:
            self._selector.stay_awake(self._busy_s)
            with _InterruptsCancel(task, self.loop):
                while True:
                    try:
                        return self.loop.run_until_complete(task)
                    except RuntimeError:
                        if task.done():
                            raise
                        if self._closed:
                            raise DriverClosed from None
                        # the stop of a call that was interrupted as it ended
        finally:
            if not task.done():
                task.cancel()
            self._selector.stay_awake(0)
            with self._lock:
                self._turning = False
                unfinished = self._calls > 0 or not task.done()
            if unfinished:
                self._turn_if_nobody_does()
            if self._closed:
                self._wanted.release()

    # -- in the background -------------------------------------------------------------------------------------------

    def _lingers(self) -> bool:
        """Whether the background thread runs the loop although no call waits."""
        return self._background and not self._calls and not self._closed

    def _turn_if_nobody_does(self) -> None:
        with self._lock:
            if self._turning or self._closed:
                return
            self._turning = self._background = True
        self._wanted.release()

    def _begin(self, work: Coroutine[Any, Any, T], future: concurrent.futures.Future[T]) -> None:
        """In the loop."""
        if future.cancelled():
            work.close()
            with self._lock:
                self._calls -= 1
            return
        task = self.loop.create_task(work)
        task.add_done_callback(partial(self._ended, future))
        future.add_done_callback(partial(self._cancel, task))

    def _cancel(self, task: asyncio.Task[T], future: concurrent.futures.Future[T]) -> None:
        if future.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
                self.loop.call_soon_threadsafe(task.cancel)

    def _ended(self, future: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
        """In the loop. Only now the call is done: one that is cancelled has things to tidy up."""
        with self._lock:
            self._calls -= 1
        error = DriverClosed() if task.cancelled() else task.exception()
        if task.cancelled() and not self._closed:
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def _turn_in_background(self) -> None:
        while True:
            self._wanted.acquire()
            while not self._closed:
                self.loop.call_soon_threadsafe(self._rest_when_idle)
                self.loop.run_forever()
                with self._lock:
                    if not self._calls:
                        self._turning = self._background = False
                        self._lingers_no_more.notify_all()
                        break
            with self._lock:
                ends = self._closed and (self._background or not self._turning)
            if ends:  # otherwise a caller still runs the loop, and notifies when it stops
                self._end()
                return

    def _end(self) -> None:
        """Cancels what is left, so that no call waits forever, and closes the loop."""
        self._turn_once()  # what was submitted last begins, and no stop is left over
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
        self._turn_once()  # callers that wait for what has ended are resumed
        self.loop.close()

    def _turn_once(self) -> None:
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def _rest_when_idle(self) -> None:
        """In the loop, while the background thread runs it: stops it if there were no calls for a while."""
        if self._calls == 0 and self._background:
            self.loop.call_later(_LINGER_S, self._rest)
        elif self._background:
            self.loop.call_later(_LINGER_S, self._rest_when_idle)

    def _rest(self) -> None:
        if self._calls:
            self._rest_when_idle()
        else:
            self._leave()

    def _leave(self) -> None:
        """In the loop: hands it to the next caller."""
        if self._lingers():
            self.loop.stop()


class _InterruptsCancel:
    """Ctrl-C ends the task, not whatever else the loop is at. It is raised once the task has ended.

    The handler is set by `_signal`, which is what `signal` calls: that one looks for each handler among the members of
    an enumeration, in vain, which would take as long as all else that a lone call costs here.
    """

    __slots__ = ("_loop", "_ours", "_struck", "_task")

    def __init__(self, task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._task = task
        self._loop = loop
        self._struck = False

    def __enter__(self) -> None:
        self._ours = (
            threading.current_thread() is threading.main_thread()
            and _signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._ours:
            _signal.signal(signal.SIGINT, self._strike)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._struck and (error is None or isinstance(error, asyncio.CancelledError)):
            raise KeyboardInterrupt

    def _strike(self, _number: int, _frame: object) -> None:
        if self._struck:
            raise KeyboardInterrupt
        self._struck = True
        self._loop.call_soon_threadsafe(self._task.cancel)
