"""Who turns an event loop that serves calls from threads: the thread that waits for an answer, or one in the background.

A thread that turns the loop itself is not woken by another one, nor does it wake one: a lone call begins and ends in its own
thread. While calls overlap, are cancelled or come from coroutines, the background thread turns the loop for all of them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_LINGER_S = 0.1
"""After its last call, the background thread keeps turning for so long: what was cancelled ends meanwhile."""


class Driver:
    """An event loop and its threads. All methods may be called from any thread, `run` also within another loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._turning = False
        """Somebody turns the loop, or is about to."""
        self._background = False
        """That is the background thread."""
        self._calls = 0
        """Calls that were submitted and are not done."""
        self._closed = False
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
        """Begins `work` in the loop. Raises RuntimeError once closed, when nobody would ever turn it."""
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError("the event loop was closed")
            self._calls += 1
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        future.add_done_callback(self._one_less)
        self._turn_if_nobody_does()
        return future

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Calls back in the loop; at the latest before whatever runs next. Does nothing once closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *arguments)
        self._turn_if_nobody_does()

    def close(self, wait_s: float) -> None:
        """Ends the threads and the loop. Nothing may be run afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._wanted.release()
        self._thread.join(wait_s)
        with self._lock:
            is_turned_elsewhere = self._turning and not self._background
        if not is_turned_elsewhere and not self._thread.is_alive():
            self.loop.close()

    # -- in the caller's thread --------------------------------------------------------------------------------------

    def _claim(self) -> bool:
        """Whether the calling thread shall turn the loop."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return False  # a thread turns one loop at a time
        with self._lock:
            if self._turning or self._closed:
                return False
            self._turning = True
            return True

    def _run_here(self, work: Coroutine[Any, Any, T]) -> T:
        task = self.loop.create_task(work)
        try:
            with _interrupts_cancel(task, self.loop):
                return self.loop.run_until_complete(task)
        finally:
            if not task.done():
                task.cancel()
            with self._lock:
                self._turning = False
                unfinished = self._calls > 0 or not task.done()
            if unfinished:
                self._turn_if_nobody_does()

    # -- in the background -------------------------------------------------------------------------------------------

    def _turn_if_nobody_does(self) -> None:
        with self._lock:
            if self._turning or self._closed:
                return
            self._turning = self._background = True
        self._wanted.release()

    def _one_less(self, _: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._calls -= 1

    def _turn_in_background(self) -> None:
        while True:
            self._wanted.acquire()
            while not self._closed:
                self.loop.call_soon_threadsafe(self._rest_when_idle)
                self.loop.run_forever()
                with self._lock:
                    if not self._calls:
                        self._turning = self._background = False
                        break
            if self._closed:
                return

    def _rest_when_idle(self) -> None:
        """In the loop, while the background thread turns it: stops it once there were no calls for a while."""
        if self._calls == 0 and self._background:
            self.loop.call_later(_LINGER_S, self._rest)
        elif self._background:
            self.loop.call_later(_LINGER_S, self._rest_when_idle)

    def _rest(self) -> None:
        if self._calls:
            self._rest_when_idle()
        elif self._background:
            self.loop.stop()


@contextlib.contextmanager
def _interrupts_cancel(task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Ctrl-C ends the task, not whatever else the loop is at. It is raised once the task has ended."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    struck = False

    def strike(_number: int, _frame: object) -> None:
        nonlocal struck
        if struck:
            raise KeyboardInterrupt
        struck = True
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGINT, strike)
    try:
        yield
    except asyncio.CancelledError:
        if not struck:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if struck:
        raise KeyboardInterrupt
