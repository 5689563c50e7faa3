"""Queues the expressions of one program state and executes them, in order, on an event loop.

Appending never waits: an expression is queued, and one task per state executes the queue. A reader of a value waits for
it: a thread blocks, a coroutine awaits. Expressions that need no response of the backend (text, for example) are
applied immediately, without the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

from bough.lang import ir
from bough.lang.backends.base import Backend
from bough.lang.errors import LangError, Origin, UnknownVariable, program_error
from bough.lang.evaluator import Evaluator
from bough.lang.loop import on_loop_thread, settle
from bough.lang.memory import Memory, StateView
from bough.lang.sampling import SamplingParams

_inside: ContextVar[tuple[ProgramRun, ...]] = ContextVar("bough_lang_runs", default=())


@dataclass(slots=True, eq=False)
class ProgramRun:
    """Shared data of all states of one execution of a program."""

    backend: Backend
    loop: asyncio.AbstractEventLoop
    defaults: SamplingParams
    stream: bool = False
    step_by_step: bool = False
    """Every `+=` waits until it is executed."""
    num_api_spec_tokens: int | None = None
    precached_chars: int = 0
    """The text begins with this many characters that the server has in its cache."""
    closed: bool = False
    """The program has returned: nothing will be appended any more."""
    executors: list[Executor] = field(default_factory=list)
    _spawning: threading.Lock = field(default_factory=threading.Lock)

    def spawn(self, *, waits_for_fork: bool = False) -> Executor:
        """Makes a new state with a unique number, even if several threads fork at the same time."""
        with self._spawning:
            executor = Executor(self, len(self.executors), waits_for_fork)
            self.executors.append(executor)
        return executor

    @property
    def root(self) -> Executor:
        return self.executors[0]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The program's Python runs in this context, and so do tasks it starts."""
        token = _inside.set((*_inside.get(), self))
        try:
            yield
        finally:
            _inside.reset(token)

    def in_program(self) -> bool:
        """Whether the caller is the program itself, not an outside reader of its state."""
        return any(run is self for run in _inside.get())

    def close(self) -> None:
        self.closed = True
        for executor in self.executors:
            executor.publish()

    def give_up(self, error: BaseException) -> None:
        """Called if the program's Python code raised: cancels running requests, because their results will not be
        used."""
        for executor in list(self.executors):
            executor.cancel(error)
        self.close()

    def wait(self) -> None:
        """Wait for everything appended to any state of the (closed) run."""
        for executor in self.executors:
            executor.wait_settled()
        self._adopt_branch_errors()

    async def async_wait(self) -> None:
        for executor in self.executors:
            await executor.async_wait_settled()
        self._adopt_branch_errors()

    def _adopt_branch_errors(self) -> None:
        """An error of a branch that was not read becomes the program's error."""
        if self.root.failure is None:
            self.root.failure = next((e.failure for e in self.executors if e.failure and not e.failure_seen), None)


class Executor:
    """One state's queue and memory. `submit` and the reads may be called from any thread."""

    def __init__(self, run: ProgramRun, number: int, waits_for_fork: bool) -> None:
        self.run = run
        self.number = number
        self.memory = Memory(cached_chars=run.precached_chars)
        self.failure: BaseException | None = None
        self.failure_seen = False
        self._evaluator = Evaluator(self)
        self._lock = threading.RLock()
        self._queue: deque[tuple[ir.Expr, Origin]] = deque()
        self._waits_for_fork = waits_for_fork
        self._draining = False
        self._pending: Counter[str] = Counter()
        self._waiters: list[Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    # -- the program's side --------------------------------------------------------------------------------------

    def submit(self, expr: ir.Expr, origin: Origin) -> None:
        """Append; returns at once (except in a step-by-step run). A failed state takes nothing more."""
        with self._lock:
            if self.failure is not None:
                self._release_branches([expr])
                return
            for item in ir.flatten((expr,)):
                self._queue.append((item, origin))
                self._pending.update(item.defines)
            if not self._draining and not self._waits_for_fork:
                self._work()
        if self.run.step_by_step:
            self.wait_settled()

    def fork(self, size: int, origin: Origin) -> list[Executor]:
        """`size` branches that begin where this state is once everything appended before has been executed."""
        branches = [self.run.spawn(waits_for_fork=True) for _ in range(size)]
        self.submit(ir.Fork(tuple(branch.number for branch in branches)), origin)
        return branches

    def get(self, name: str) -> Any:
        self._wait(lambda: self._readable(name), name)
        return self._read(name)

    async def async_get(self, name: str) -> Any:
        await self._async_wait(lambda: self._readable(name))
        return self._read(name)

    def set(self, name: str, value: Any) -> None:
        with self._lock:
            self.memory.set_variable(name, value, {})
            self._wake()

    def has(self, name: str) -> bool:
        if self._pending[name] or name in self.memory.variables:
            return True
        self.wait_settled()
        return name in self.memory.variables

    def get_meta_info(self, name: str) -> Any:
        """The backend's meta information about a variable, or about the last join (`"join"`); None if it has none."""
        self._wait(lambda: self._settled() if name == "join" else self._readable(name), name)
        if name not in self.memory.meta_info:
            self.raise_if_failed()
        return self.memory.meta_info.get(name)

    def error(self) -> BaseException | None:
        self.wait_settled()
        self.failure_seen = True
        return self.failure

    def text(self) -> str:
        self.wait_settled()
        self.raise_if_failed()
        return self.memory.transcript.text

    def messages(self) -> list[dict[str, Any]]:
        self.wait_settled()
        self.raise_if_failed()
        return list(self.memory.transcript.messages)

    def wait_settled(self) -> None:
        """Wait until everything appended is executed; readers outside the program also wait for its end."""
        self._wait(self._settled, None)

    async def async_wait_settled(self) -> None:
        await self._async_wait(self._settled)

    async def async_wait_idle(self) -> None:
        """Wait until everything appended so far is executed."""
        await self._async_wait(self._idle)

    def wait_longer(self, name: str | None, sent: int) -> StateView:
        """What there is of the state's or a variable's text, once it is more than `sent` characters or all."""
        self._wait(lambda: len(self._visible(name)) > sent or self._complete(name), name)
        return self._heard(name)

    async def async_wait_longer(self, name: str | None, sent: int) -> StateView:
        await self._async_wait(lambda: len(self._visible(name)) > sent or self._complete(name))
        return self._heard(name)

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            self._raise_failure()

    def raise_if_unknown(self, name: str) -> None:
        if name not in self.memory.variables:
            raise self._unknown(name)

    def publish(self) -> None:
        """Wakes all waiters after a change."""
        with self._lock:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Stop with `error`; branches still waiting for their fork stop with it."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            waiting = [expr for expr, _ in self._queue]
            self._queue.clear()
            self._release_branches(waiting)
            self._wake()

    def cancel(self, error: BaseException) -> None:
        """Cancels what is not finished; the root state keeps the error."""
        with self._lock:
            if self.number == 0 or not self._idle():
                self.fail(error)
            task = self._task
        if task is not None and not task.done() and not self.run.loop.is_closed():
            self.run.loop.call_soon_threadsafe(task.cancel)

    def begin_from(self, parent: Memory) -> None:
        """A branch copies its parent's memory at the fork and then executes what was appended to it since."""
        with self._lock:
            own = self.memory.variables
            self.memory = parent.branch()
            self.memory.variables.update(own)
            self._waits_for_fork = False
            if self.failure is None and self._queue:
                self._work()
            self._wake()

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], name: str | None) -> None:
        while True:
            with self._lock:
                if ready():
                    return
                if on_loop_thread(self.run.loop):
                    raise LangError(
                        what=f"{'the state' if name is None else f'the variable {name!r}'} is not ready, and this "
                        "code runs on the event loop",
                        why="waiting here would stop the loop that produces it",
                        fix="`await s` first" if name is None else f"`await s.aget({name!r})`, or `await s` first",
                    )
                waiter: Future[None] = Future()
                self._waiters.append(waiter)
            waiter.result()

    async def _async_wait(self, ready: Callable[[], bool]) -> None:
        while True:
            with self._lock:
                if ready():
                    return
                waiter: Future[None] = Future()
                self._waiters.append(waiter)
            await asyncio.wrap_future(waiter)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            settle(waiter)

    def _idle(self) -> bool:
        nothing_left = not self._waits_for_fork and not self._queue
        return not self._draining and (nothing_left or self.failure is not None)

    def _settled(self) -> bool:
        return self._idle() and (self.run.closed or self.run.in_program())

    def _known(self, name: str) -> bool:
        return name in self.memory.variables and not self._pending[name]

    def _readable(self, name: str) -> bool:
        return self._known(name) or self.failure is not None or self._settled()

    def _read(self, name: str) -> Any:
        with self._lock:
            if not self._known(name):
                self.raise_if_failed()
                raise self._unknown(name)
            return self.memory.variables[name]

    def _unknown(self, name: str) -> UnknownVariable:
        return UnknownVariable(
            what=f"the program has no variable {name!r}",
            why=f"it has {', '.join(map(repr, self.memory.variables)) or 'none so far'}",
            fix=f"append gen({name!r}) or select({name!r}, ...) before reading it",
        )

    def _visible(self, name: str | None) -> str:
        return self.memory.transcript.text if name is None else self.memory.shown.get(name, "")

    def _complete(self, name: str | None) -> bool:
        return self.failure is not None or self._settled() or (name is not None and self._known(name))

    def _heard(self, name: str | None) -> StateView:
        with self._lock:
            meta = self.memory.meta_info.get(name, {}) if name is not None else {}
            return StateView(self._visible(name), self._complete(name), meta)

    def _raise_failure(self) -> NoReturn:
        self.failure_seen = True
        assert self.failure is not None
        raise self.failure

    # -- working the queue off -----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Applies expressions that need no backend, then starts a task for the rest. Called with the lock held and
        while no task runs."""
        while self._queue and self._evaluator.needs_nobody(self._queue[0][0]):
            expr, origin = self._queue.popleft()
            try:
                self._evaluator.apply(expr)
            except Exception as error:
                self._expression_failed(expr, origin, error)
            else:
                self._expression_done(expr)
        if not self._queue:
            return
        self._draining = True
        if on_loop_thread(self.run.loop):
            self._start_task()
        else:
            self.run.loop.call_soon_threadsafe(self._start_task)

    def _start_task(self) -> None:
        self._task = self.run.loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            while (following := self._next()) is not None:
                expr, origin = following
                try:
                    await self._evaluator.evaluate(expr, origin)
                except Exception as error:
                    self._expression_failed(expr, origin, error)
                else:
                    self._expression_done(expr)
        except BaseException as error:
            with self._lock:
                self._draining = False
                self.fail(LangError(what="the program was stopped", why="its run was cancelled"))
            if not isinstance(error, asyncio.CancelledError):
                raise

    def _next(self) -> tuple[ir.Expr, Origin] | None:
        """The next expression. None: the queue is empty, and the next append starts another task."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._draining = False
            self._wake()
            return None

    def _expression_done(self, expr: ir.Expr) -> None:
        with self._lock:
            if expr.defines and not self._evaluator.deferring(expr):
                self.defined(expr.defines)
            self._wake()

    def defined(self, names: tuple[str, ...]) -> None:
        """The variables have the values that the expressions appended so far give them."""
        with self._lock:
            self._pending.subtract(names)

    def _expression_failed(self, expr: ir.Expr, origin: Origin, error: Exception) -> None:
        wrapped = program_error(expr.describe(), error, origin)
        with self._lock:
            self.fail(wrapped)
            self._release_branches([expr])

    def _release_branches(self, exprs: list[ir.Expr]) -> None:
        """Fails the branches of forks that will not be executed; only this state reports the error."""
        for expr in exprs:
            if isinstance(expr, ir.Fork) and self.failure is not None:
                for number in expr.branches:
                    branch = self.run.executors[number]
                    branch.failure_seen = True
                    branch.fail(self.failure)
