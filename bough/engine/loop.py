"""The loop: receive, plan, launch, settle. Modes differ in what is plugged in, never in a copy of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from bough.cache.prefix import PrefixCache
from bough.core.errors import BoughError, Unavailable
from bough.core.messages import Abort, Generate, StopAt, Wake
from bough.core.step import Launched, Outcome, Runner
from bough.engine.control import Control, Hooks
from bough.engine.inbox import Clock, MessageSink, MessageSource, SystemClock
from bough.scheduler.accept import abort, abort_all, accept, collect_grammars, expire, stop_at
from bough.scheduler.account import check_account
from bough.scheduler.commit import Flight, commit, grow_tree
from bough.scheduler.fail import fail_step, is_out_of_memory
from bough.scheduler.limits import Limits
from bough.scheduler.masks import fill_masks
from bough.scheduler.plan import plan_step
from bough.scheduler.queues import Queues
from bough.scheduler.settle import settle
from bough.scheduler.sharing import Groups

_FAILURES_IN_A_ROW = 3
_BLOCKED_S = 0.001
"""How long to wait for news when requests wait for something that no step will bring."""


def _later() -> None:
    """The mail leaves at the end of the turn: the device waits for something else."""


class EngineBroken(BoughError):
    """Steps keep failing, or a runner says that no other can follow: the process had better start afresh."""


class Laps(Struct):
    """Seconds of host work by phase, since the start. `wait` is the device's."""

    receive: float = 0.0
    plan: float = 0.0
    commit: float = 0.0
    launch: float = 0.0
    mask: float = 0.0
    wait: float = 0.0
    settle: float = 0.0
    send: float = 0.0


class _InFlight(Struct):
    flight: Flight
    launched: Launched | None
    launched_s: float
    began_s: float
    """By `Loop.step_clock`."""
    error: Exception | None = None

    def wait(self) -> Outcome:
        if self.error is not None or self.launched is None:
            raise self.error or RuntimeError("the step was never launched")
        return self.launched.wait()


class Company(Protocol):
    """Other schedulers that this one runs in lockstep with."""

    def join(self) -> bool:
        """Called in turns without a step of its own. Returns whether others are at work."""
        ...


class Loop:
    """Drives a runner from an inbox to an outbox. `depth` steps stay in flight while the next one is planned. `step_clock`:
    what steps are compared by, if not by the time that passes."""

    def __init__(
        self,
        *,
        runner: Runner,
        queues: Queues,
        cache: PrefixCache,
        limits: Limits,
        inbox: MessageSource,
        outbox: MessageSink,
        depth: int = 1,
        hooks: Hooks | None = None,
        clock: Clock | None = None,
        step_clock: Callable[[], float] | None = None,
        idle_s: float = 0.5,
        report_every_s: float = 5.0,
        report_every_steps: int = 0,
        strict: bool = False,
        company: Company | None = None,
    ) -> None:
        self.runner = runner
        self.queues = queues
        self.cache = cache
        self.limits = limits
        self.inbox = inbox
        self.outbox = outbox
        self.depth = depth
        self.hooks = hooks or Hooks()
        self.clock = clock or SystemClock()
        self.step_clock = step_clock or self.clock.monotonic
        """Seconds by which steps of several kinds are compared."""
        self.idle_s = idle_s
        self.company = company
        self.strict = strict
        """Check the whole page account after every turn (tests)."""
        self.control = Control(
            queues, cache, self.hooks, report_every_s=report_every_s, report_every_steps=report_every_steps
        )
        self.laps = Laps()
        self.done = False
        self._groups = Groups()
        self._in_flight: deque[_InFlight] = deque()
        self._failures = 0
        self._settled_s = self._ended_s = 0.0
        self._busy = True
        self._worked = False

    def run(self) -> None:
        """Turns until the inbox closes or a shutdown is complete."""
        while not self.done and not self.inbox.closed:
            self.turn()
        self._settle(keep=0)
        self.runner.clear()

    def turn(self) -> None:
        """One turn: what has come, one step planned and launched, the steps before it settled, what is due sent."""
        self._receive()
        entry = self._launch_next()
        if entry is None and self.company is not None and self.company.join():
            self._worked = True
        pipelined = self.limits.num_stages > 1
        if entry is not None and entry.launched is not None and entry.launched.needs_masks:
            if not pipelined:  # no step in a pipeline has a row of this one
                self._settle(keep=1, tell=_later)
            self._sample(entry, entry.launched)
        if entry is not None and entry.error is None:
            self._settle(keep=self.depth)
        else:
            # What a pipeline has settled may be planned again before the next step comes out of it.
            self._settle(keep=max(0, len(self._in_flight) - 1) if pipelined and entry is None else 0)
        self._send()
        if self.strict:
            check_account(self.queues, self.cache)
        self._rest()

    # -- the way in -------------------------------------------------------------------------------

    def _receive(self) -> None:
        messages = self.inbox.drain(0.0 if self._busy or self._in_flight else self._patience_s())
        began = time.perf_counter()
        now = self.clock.monotonic()
        for message in messages:
            match message:
                case Generate():
                    accept(self.queues, message, now=now)
                case Abort():
                    abort(self.queues, self.cache, message, now=now)
                case StopAt():
                    stop_at(self.queues, self.cache, message, now=now)
                case Wake():
                    """The inbox has seen to it."""
                case _:
                    self.control.handle(message, now=now)
        if self.queues.deadlines:
            expire(self.queues, self.cache, now=now)
        if self.queues.compiling:
            collect_grammars(self.queues, self.cache, now=now)
        self.laps.receive += time.perf_counter() - began

    def _patience_s(self) -> float:
        """How long nothing but a message can be news."""
        if self.control.stop_by_s is not None or self.queues.compiling:
            return _BLOCKED_S
        if len(self.queues.waiting) and not self.control.paused:
            return _BLOCKED_S
        if self.queues.deadlines:
            return max(0.0, min(self.idle_s, self.queues.deadlines[0][0] - self.clock.monotonic()))
        return self.idle_s

    # -- one step ---------------------------------------------------------------------------------

    def _launch_next(self) -> _InFlight | None:
        """Plans, commits and launches a step. None: there is nothing to run."""
        self._worked = False
        if self.control.paused:
            return None
        began = time.perf_counter()
        plan = plan_step(self.queues, self.cache.view(), self.limits)
        self._worked = plan.has_rows or bool(plan.retract or plan.preempt)
        planned = time.perf_counter()
        now = self.clock.monotonic()
        flight = commit(plan, self.queues, self.cache, self._groups, self.limits, now=now)
        committed = time.perf_counter()
        self.laps.plan += planned - began
        self.laps.commit += committed - planned
        if flight is None:
            return None
        entry = _InFlight(flight, None, now, self.step_clock())
        try:
            entry.launched = self.runner.launch(flight.step)
        except Exception as error:
            entry.error = error
        launched = time.perf_counter()
        self._in_flight.append(entry)
        grow_tree(flight, self.queues, self.cache)
        self.laps.launch += launched - committed
        self.laps.commit += time.perf_counter() - launched
        return entry

    def _sample(self, entry: _InFlight, launched: Launched) -> None:
        """A mask needs the token before it: every earlier step has settled by now."""
        began = time.perf_counter()
        try:
            launched.sample(fill_masks(entry.flight, self.queues))
        except Exception as error:
            entry.error = error
        self.laps.mask += time.perf_counter() - began

    def _settle(self, *, keep: int, tell: Callable[[], None] | None = None) -> None:
        """Settles the oldest steps until `keep` are in flight. The only place that waits for the device.

        Their news leave before their memory is put in order, unless `tell` does something else.
        """
        while len(self._in_flight) > keep:
            entry = self._in_flight.popleft()
            self._worked = True
            began = time.perf_counter()
            outcome, error = None, None
            try:
                outcome = entry.wait()
            except Exception as raised:
                error = raised
            waited = time.perf_counter()
            now = self.clock.monotonic()
            sent_s = self.laps.send
            if outcome is not None:
                settle(entry.flight, outcome, self.queues, self.cache, now=now, tell=tell or self._send)
                self._learn(entry, now)
                self._failures = 0
            elif error is not None:
                self._fail(entry, error, now)
            self.laps.wait += waited - began
            self.laps.settle += time.perf_counter() - waited - (self.laps.send - sent_s)

    def _learn(self, entry: _InFlight, now: float) -> None:
        """What the step cost: it ran from its launch, or from the end of the step before it."""
        spent_ms = 1e3 * (now - max(entry.launched_s, self._settled_s))
        step = entry.flight.step
        self.queues.cost.observe(spent_ms, step.num_tokens - step.num_decode_tokens)
        if self.queues.drafter is not None:
            ended_s = self.step_clock()
            took_ms = 1e3 * (ended_s - max(entry.began_s, self._ended_s))
            self._ended_s = ended_s
            if step.num_tokens == step.num_decode_tokens:
                self.queues.drafter.timed(step.num_rows, step.num_tokens, took_ms, step.proposals)
            else:
                self.queues.drafter.prompts_timed(took_ms, step.proposals)
        self._settled_s = now
        if entry.flight.chunks:
            self.queues.grow_prefills()

    def _fail(self, entry: _InFlight, error: Exception, now: float) -> None:
        step = entry.flight.step
        self.hooks.problem(f"step {step.index} ({step.num_rows} rows) failed: {type(error).__name__}: {error}")
        broken = isinstance(error, EngineBroken)
        if not broken:  # else its requests fare as all others: another engine can compute them
            fail_step(entry.flight, error, self.queues, self.cache, now=now)
        if is_out_of_memory(error) and not broken:
            # Smaller steps follow, and a request that meets it again fails: it ends by itself. They have the memory of what
            # the step had computed, which the error's frames would keep.
            error.__traceback__ = None
            return
        self._failures += 1
        if broken or self._failures >= _FAILURES_IN_A_ROW:
            self._in_flight.clear()
            abort_all(self.queues, self.cache, Unavailable(what="the engine broke down"), now=now)
            self._send()
            if broken:
                raise error
            raise EngineBroken(
                what=f"{self._failures} steps in a row have failed", why=f"{type(error).__name__}: {error}"
            ) from error

    # -- the way out ------------------------------------------------------------------------------

    def _send(self) -> None:
        began = time.perf_counter()
        for message in self.queues.mail.take():
            self.outbox.send(message)
        self.laps.send += time.perf_counter() - began

    def _rest(self) -> None:
        """Ends a turn: the beat, the report, and what is done only when nothing runs."""
        now = self.clock.monotonic()
        self.hooks.heartbeat(self.queues.settled + 1)
        self.control.tell(now=now)
        was_busy, self._busy = self._busy, self._worked
        if self.control.stop_by_s is not None:
            self._wind_up(now)
        if was_busy and not self._busy and self.queues.num_live == 0:
            self.runner.clear()
            if self.cache.repair():
                self.hooks.problem("the page account was not whole: the cache was emptied")

    def _wind_up(self, now: float) -> None:
        """Shutting down: what still runs gets its time, then everything ends."""
        stop_by = self.control.stop_by_s
        assert stop_by is not None, "only called while shutting down"
        if now >= stop_by or self.queues.idle:
            cut = Unavailable(
                what="the answer was cut off",
                why="the server is shutting down, and its drain timeout (--drain-timeout-s) has passed",
                fix="send the request again",
            )
            abort_all(self.queues, self.cache, cut, now=now)
            self._settle(keep=0)
            self._send()
            self.done = True
