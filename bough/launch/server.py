"""The processes of a server: started, wired, watched, and ended."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bough.config.concerns import Config
from bough.config.hf import Checkpoint
from bough.config.hosts import crew_of, local_ranks
from bough.config.layout import Layout
from bough.core.errors import BoughError, ConfigError, Unavailable
from bough.core.messages import Shutdown
from bough.ipc import (
    Endpoints,
    EngineStatus,
    Launch,
    Outbox,
    read_error,
    read_status,
    save_launch,
    write_checkpoint,
    write_quarantine,
    write_status,
)
from bough.ipc.endpoints import PrivateDirectory
from bough.ipc.group import Group, JoinFacts, Leader, Member
from bough.ipc.link import Listener
from bough.ipc.store import StoreServer
from bough.launch.causes import STOPPED_S, find_cause, stopped, stuck, write_crash_bundle
from bough.launch.children import KILL_AFTER_S, Child, Programs, end, how_it_ended, spawn, wait
from bough.launch.model import located
from bough.observability.crash import make_directory
from bough.observability.flight import read_flight, suspects
from bough.observability.health import Pulse, State
from bough.platform.processes import is_stopped

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
_SETTLE_S = 0.3
"""After one process has died, time for the others to say why they die with it: the first to fail is the cause."""
_GROUP_SETTLE_S = 0.8
"""The same, where the cause may be on another machine, which settles first and then says so."""
_MOST_RESTARTS = 5
"""Of one replica: as many crashes are no accident."""
_ANSWER_S = 1.0
"""Time for API workers to tell waiting clients that the engine is gone."""
_GRACE_S = 5.0
_RESTARTS_WITHIN_S = 300.0
"""An API worker that dies is started again; if as many die within this time, something else is wrong."""


def start(
    config: Config,
    *,
    num_api_workers: int | None = None,
    listen_fds: Sequence[int] = (),
    programs: Programs | None = None,
    quarantine: frozenset[int] = frozenset(),
    checkpoint: Checkpoint | None = None,
) -> ServerProcesses:
    """Finds the model (downloads it if need be) and starts the processes; returns at once, before they are ready.

    `checkpoint`: that of the config, which `located` has returned with it; None: it is looked for now.
    `listen_fds` are listening sockets that API workers 1 and up inherit. `quarantine`: fingerprints of requests that the
    engine must refuse. Raises `ConfigError` if there is no such model, or crash bundles could not be written.
    """
    if config.parallel.use_ray and not config.parallel.dist_init_addr:
        raise ConfigError(
            what="use_ray is set, and Ray was not asked for machines",
            why="`bough serve` asks it; an offline engine does not",
            fix="leave it out, or use `bough serve --use-ray`",
            param="use_ray",
        )
    if config.log.crash_dir:
        make_directory(Path(config.log.crash_dir).expanduser())
    config, checkpoint = (config, checkpoint) if checkpoint is not None else located(config)
    return ServerProcesses(
        config,
        checkpoint,
        num_api_workers=config.server.api_workers if num_api_workers is None else num_api_workers,
        listen_fds=tuple(listen_fds),
        programs=programs or Programs(),
        quarantine=quarantine,
    )


class ServerProcesses:
    """A server's processes. Safe to use from several threads."""

    def __init__(
        self,
        config: Config,
        checkpoint: Checkpoint,
        *,
        num_api_workers: int,
        listen_fds: tuple[int, ...],
        programs: Programs,
        quarantine: frozenset[int] = frozenset(),
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.facts: dict[str, Any] = {}
        self.suspects: frozenset[int] = frozenset()
        """Once it has failed: fingerprints of the requests that the engine was computing."""
        self._private = PrivateDirectory()
        self.endpoints: Endpoints = self._private.endpoints
        self._programs = programs
        self._num_api_workers = max(1, num_api_workers)
        self._listen_fds = listen_fds
        self._children: list[Child] = []
        self._error: BoughError | None = None
        self._callbacks: list[Callable[[BoughError], None]] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._deadline_s = float("inf")
        self._owner_pid = os.getpid()
        self._lifeline, self._keep_alive = os.pipe()
        self._engines = self.endpoints.replicas(config.parallel.num_schedulers)
        """Of each scheduler."""
        for each in self._engines:
            Path(each.directory).mkdir(mode=0o700, exist_ok=True)
            if quarantine:
                write_quarantine(each, quarantine)
        self._pulses: dict[str, Pulse] = {}
        self._ready = threading.Event()
        self._lost: set[int] = set()
        self._restarts: Counter[int] = Counter()
        self._worker_restarts: list[float] = []
        """When API workers were started again."""
        self._ended_because: BoughError | None = None
        """Once this process has ended an engine's: because it was stuck or stopped."""
        self._meetings: dict[int, StoreServer] = {}
        self._group: Group | None = None
        self._stopped_since: dict[str, float] = {}
        try:
            self._start_children()
        except BaseException:
            self.stop()
            raise
        self._monitor = threading.Thread(target=self._watch, name="launch-watch", daemon=True)
        self._monitor.start()
        atexit.register(self.stop)

    # -- for the owner ---------------------------------------------------------------------------------------------

    def wait_ready(
        self, progress: Callable[[EngineStatus], None] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Waits until the engine takes requests and returns its facts. `progress` hears of every change on the way.

        Raises the error that start-up failed with.
        """
        give_up_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        reported: tuple[str, str, float] | None = None
        while True:
            error = self.failed()
            if error is not None:
                raise error
            if self._stopping.is_set():
                raise Unavailable(what="the server was stopped before it was ready")
            status = self._status()
            news = (status.phase, status.detail, status.progress)
            if progress is not None and news != reported and status.phase != "failed":
                progress(status)
            reported = news
            if status.phase == "ready":
                break
            if time.monotonic() > give_up_s:
                raise Unavailable(
                    what=f"the engine was not ready within {timeout_s:g} s", why=f"it is {status.detail or 'starting'}"
                )
            time.sleep(0.02)
        self.facts = status.facts
        self._ready.set()
        if isinstance(self._group, Leader):
            self._group.opened(self.facts)
        self._start_api_workers()
        return self.facts

    def _status(self) -> EngineStatus:
        """How far the engines have come: the last of them. On another machine than that of rank 0, as that one says."""
        if not isinstance(self._group, Member):
            statuses = [read_status(each) for each in self._engines]
            behind = min(statuses, key=lambda status: (status.phase == "ready", status.progress))
            if behind.phase == "ready" and len(statuses) > 1:
                each_engine, count = enumerate(statuses), self.config.parallel.attn_dp_size
                ranks = [{"replica": at // count, **rank} for at, each in each_engine for rank in each.facts["ranks"]]
                behind.facts = statuses[0].facts | {"ranks": ranks}
                write_status(self.endpoints, behind)
            return behind
        if self._group.ready is None:
            return EngineStatus(phase="loading", detail="loading with the other machines")
        return EngineStatus(phase="ready", facts=self._group.ready)

    def failed(self) -> BoughError | None:
        """Why the server has ended by itself, if it has."""
        return self._error

    def on_failure(self, callback: Callable[[BoughError], None]) -> None:
        """Calls back, in another thread, as soon as a process has died; the others are being ended then."""
        with self._lock:
            self._callbacks.append(callback)
            error = self._error
        if error is not None:
            callback(error)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; this process is API worker 0 and not among them."""
        return {child.name: child.process.pid for child in self._children}

    def stop(self, drain_s: float = 0.0) -> None:
        """Ends all processes and removes the private directory. Requests under way get `drain_s` to finish.

        A second call, from a signal handler or another thread, shortens the first one's patience.
        """
        if os.getpid() != self._owner_pid:
            return  # a fork of the owner, at its exit
        self._deadline_s = min(self._deadline_s, time.monotonic() + drain_s + _GRACE_S)
        with self._lock:
            first = not self._stopping.is_set()
            self._stopping.set()
        if not first:
            self._deadline_s = min(self._deadline_s, time.monotonic() + drain_s)
            self._stopped.wait(drain_s + 2 * _GRACE_S)
            return
        try:
            self._end_all(drain_s)
        finally:
            if self._group is not None:
                self._group.close()
            for meeting in self._meetings.values():
                meeting.close()
            self._private.remove()
            os.close(self._lifeline)
            os.close(self._keep_alive)
            self._stopped.set()
            atexit.unregister(self.stop)

    def __enter__(self) -> ServerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- starting --------------------------------------------------------------------------------------------------

    def _save_launch(self, scheduler: int | None = None) -> Launch:
        """For the children that the calling thread is about to start: those of one scheduler, or the others."""
        replica = 0 if scheduler is None else scheduler // self.config.parallel.attn_dp_size
        launch = Launch(
            config=self.config,
            directory=(self.endpoints if scheduler is None else self._engines[scheduler]).directory,
            home=self.endpoints.directory,
            replica=replica,
            scheduler=scheduler or 0,
            meeting_directory=self._schedulers_of(replica)[0].directory,
            parent_pid=os.getpid(),
            lifeline_fd=self._lifeline,
            die_with_parent_thread=threading.current_thread() is threading.main_thread(),
            listen_fds=self._listen_fds,
            num_api_workers=self._num_api_workers,
            generation=0 if self._group is None else self._group.generation,
        )
        save_launch(launch)
        return launch

    def _start_children(self) -> None:
        write_checkpoint(self.endpoints, self.checkpoint)
        for replica in range(self.config.parallel.dp_size):
            self._start_engine(replica)
        launch = self._save_launch()
        if launch.detokenizes and self.config.parallel.node_rank == 0:
            self._spawn("detokenizer", (*self._programs.detokenizer, self.endpoints.directory))

    def _start_engine(self, replica: int) -> None:
        """Starts the ranks of one engine that run on this machine."""
        self._meet(replica)
        parallel = self.config.parallel
        first = replica * parallel.attn_dp_size
        for scheduler in range(first, first + parallel.attn_dp_size):
            self._save_launch(scheduler)
        layout = Layout.of(parallel)
        for rank in local_ranks(parallel):
            scheduler = first + layout.place(rank)["dp"]
            if rank == crew_of(parallel, rank)[0]:
                name = f"engine.{scheduler}" if len(self._engines) > 1 else "engine"
            else:
                name = f"rank{rank}.{replica}" if parallel.dp_size > 1 else f"rank{rank}"
            which = () if name == "engine" else (str(rank), name)
            self._spawn(name, (*self._programs.engine, self._engines[scheduler].directory, *which), replica, scheduler)

    def _schedulers_of(self, replica: int) -> list[Endpoints]:
        """Where the schedulers of one engine are reached."""
        count = self.config.parallel.attn_dp_size
        return self._engines[replica * count : (replica + 1) * count]

    def _meet(self, replica: int) -> None:
        """Opens the meeting place of an engine's ranks, or joins that of machine 0."""
        parallel = self.config.parallel
        if Layout.of(parallel).size == 1:
            return
        facts = JoinFacts.of(self.config, self.checkpoint) if parallel.nnodes > 1 else None
        if facts is not None and parallel.node_rank > 0:
            place, secret = parallel.dist_init_addr, parallel.dist_secret
            self._group = Member(place, secret, facts, parallel.node_rank, parallel.dist_timeout_s)
            return
        listeners = [Listener(self._schedulers_of(replica)[0].meeting)]
        if facts is not None:
            listeners.append(Listener(parallel.dist_init_addr, parallel.dist_secret))
        meeting = StoreServer(listeners, generation=time.time_ns() & 0x7FFF_FFFF_FFFF if facts else 0)
        self._meetings[replica] = meeting
        if facts is not None:
            self._group = Leader(meeting, facts, parallel.nnodes, parallel.dist_timeout_s)

    def _start_api_workers(self) -> None:
        with self._lock:
            if self._num_api_workers > 1 and not self._stopping.is_set() and "api1" not in self.pids:
                self._save_launch()
                for worker in range(1, self._num_api_workers):
                    self._spawn_worker(f"api{worker}")

    def _spawn_worker(self, name: str) -> None:
        self._spawn(name, (*self._programs.api, self.endpoints.directory, name.removeprefix("api")))

    def _spawn(
        self, name: str, arguments: tuple[str, ...], replica: int | None = None, scheduler: int | None = None
    ) -> None:
        inherited = (self._lifeline, *self._listen_fds) if name.startswith("api") else (self._lifeline,)
        endpoints = self.endpoints if scheduler is None else self._engines[scheduler]
        child = spawn(name, arguments, self.config, endpoints, inherited=inherited, replica=replica)
        self._children.append(child)

    # -- watching --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until something has died that the server can't do without. A look that fails is logged, and others follow."""
        while not self._stopping.wait(_LOOK_EVERY_S):
            try:
                if self._look():
                    return
            except Exception:
                _log.exception("the processes could not be looked after, and are looked after again")
                self._stopping.wait(_SETTLE_S)

    def _look(self) -> bool:
        """Starts dead API workers again, and does without dead engines where others go on. Returns whether the server has
        failed."""
        if self.config.server.supervise:
            self._end_if_stuck()
        self._end_if_stopped()
        dead = [child for child in self._children if not child.alive]
        broken = None if self._group is None else self._group.look()
        if broken is not None:
            self._fail(dead[0] if dead else None)
            return True
        dead = [child for child in dead if not (child.name.startswith("api") and self._start_again(child))]
        if dead and self._can_lose(dead):
            self._lose(dead[0])
        elif dead:
            self._fail(dead[0])
            return True
        return False

    def _start_again(self, dead: Child) -> bool:
        """Another API worker in the place of a dead one, whose clients have lost their answers. False: too many died."""
        with self._lock:
            now = time.monotonic()
            self._worker_restarts = [at for at in self._worker_restarts if now - at < _RESTARTS_WITHIN_S]
            if self._stopping.is_set() or len(self._worker_restarts) >= _MOST_RESTARTS:
                return False
            error = read_error(self.endpoints, dead.name) or how_it_ended(dead)
            self.endpoints.error(dead.name).unlink(missing_ok=True)
            _log.error("%s; it is started again", error.sentence())
            self._worker_restarts.append(now)
            self._children.remove(dead)
            self._save_launch()
            self._spawn_worker(dead.name)
        return True

    def _end_if_stuck(self) -> None:
        """A process that no longer moves is as good as dead: it is ended, and treated as such."""
        for child in [each for each in self._children if each.alive]:
            beat = self._pulse_of(child).read()
            stale = beat.state is not State.STARTING and beat.age_s > self.config.server.watchdog_timeout_s
            if stale and beat.pid == child.process.pid:
                if not child.name.startswith("api"):
                    self._ended_because = stuck(child.name, self.config.server.watchdog_timeout_s)
                _log.error("the %s process has not moved for %.0f s and is ended", child.name, beat.age_s)
                child.signal(signal.SIGKILL)
                child.process.wait()

    def _pulse_of(self, child: Child) -> Pulse:
        """Ranks other than the first have none: it never beats."""
        if child.name not in self._pulses:
            path = child.endpoints.heartbeat if child.is_first_rank else self.endpoints.beat(child.name)
            self._pulses[child.name] = Pulse(path)
        return self._pulses[child.name]

    def _can_lose(self, dead: list[Child]) -> bool:
        """Whether other engines go on without these processes."""
        gone = {child.replica for child in dead}
        ready = [
            number
            for number in range(self.config.parallel.dp_size)
            if all(read_status(each).phase == "ready" for each in self._schedulers_of(number))
        ]
        return None not in gone and self._ready.is_set() and bool(set(ready) - gone - self._lost)

    def _lose(self, dead: Child) -> None:
        """One of several engines has died: the others go on, and with `--supervise` another takes its place."""
        replica = dead.replica
        assert replica is not None, "only engines can be lost"
        self._stopping.wait(_SETTLE_S)
        its = [child for child in self._children if child.replica == replica]
        error = self._ended_because or find_cause(dead, its, self._group)
        self._ended_because = None
        self._children = [child for child in self._children if child.replica != replica]
        self._lost.add(replica)
        for each in self._schedulers_of(replica):
            write_status(each, EngineStatus(phase="failed", error=error.sentence()))
        _log.error("replica %d is lost: %s", replica, error.sentence())
        for child in its:
            child.signal(signal.SIGKILL)
            child.process.wait()
        if replica in self._meetings:
            self._meetings.pop(replica).close()
        self._restarts[replica] += 1
        if self.config.server.supervise and self._restarts[replica] < _MOST_RESTARTS:
            with self._lock:
                if not self._stopping.is_set():
                    _log.info("starting replica %d again", replica)
                    for child in its:
                        child.endpoints.error(child.name).unlink(missing_ok=True)
                    self._lost.discard(replica)
                    self._start_engine(replica)

    def _end_if_stopped(self) -> None:
        """A rank that was stopped (SIGSTOP) keeps all others waiting: it is ended, and the group with it."""
        ranks = [child for child in self._children if child.replica is not None]
        if Layout.of(self.config.parallel).size == 1:
            return
        now = time.monotonic()
        for child in ranks:
            if not is_stopped(child.process.pid):
                self._stopped_since.pop(child.name, None)
            elif now - self._stopped_since.setdefault(child.name, now) > STOPPED_S:
                self._ended_because = stopped(child.name)
                child.signal(signal.SIGKILL)
                child.process.wait()

    def _fail(self, dead: Child | None) -> None:
        """A process of ours has died, or the group of machines is broken: find the cause, report it, end the others."""
        self._stopping.wait(self._settle_s(dead))
        error = self._ended_because or find_cause(dead, self._children, self._group)
        if self._group is not None:
            self._group.fail(error)
        steps = read_flight((self._engines[0] if dead is None or dead.replica is None else dead.endpoints).flight)
        self.suspects = suspects(steps)
        with self._lock:
            if self._stopping.is_set():
                return
            self._error = error
            callbacks = list(self._callbacks)
        with contextlib.suppress(OSError):
            write_status(self.endpoints, EngineStatus(phase="failed", error=error.sentence()))
        if self.config.log.crash_dir:
            write_crash_bundle(self.config, self.facts, dead, self._children, error, steps)
        for callback in callbacks:
            callback(error)
        inner = [child for child in self._children if not child.name.startswith("api")]
        for child in inner:
            child.signal(signal.SIGTERM)
        wait(inner, KILL_AFTER_S)
        for child in inner:
            child.signal(signal.SIGKILL)
        outer = [child for child in self._children if child.name.startswith("api")]
        if outer and not self._stopping.wait(_ANSWER_S):
            for child in outer:
                child.signal(signal.SIGTERM)

    def _settle_s(self, dead: Child | None) -> float:
        """How long the cause may take to show. A machine whose rank has failed speaks before machine 0 asks."""
        failed_here = dead is not None and dead.process.returncode != 0
        if self._group is None or (isinstance(self._group, Member) and failed_here):
            return _SETTLE_S
        return _GROUP_SETTLE_S

    # -- ending ----------------------------------------------------------------------------------------------------

    def _end_all(self, drain_s: float) -> None:
        by_name = {child.name: child for child in self._children}
        ranks = [child for child in self._children if child.replica is not None]
        engines = [child for child in ranks if child.is_first_rank]
        workers = [child for child in self._children if child.name.startswith("api")]
        for worker in workers:
            worker.signal(signal.SIGTERM)
        for engine in engines:
            if engine.alive:
                self._ask_to_end(engine, drain_s)
        if not engines:
            for rank in ranks:
                rank.signal(signal.SIGTERM)
        end(ranks, lambda: self._deadline_s)
        detokenizer = by_name.get("detokenizer")
        if detokenizer is not None:
            detokenizer.signal(signal.SIGTERM)
            end([detokenizer], lambda: time.monotonic())
        end(workers, lambda: self._deadline_s)

    def _ask_to_end(self, engine: Child, drain_s: float) -> None:
        """A message if its loop runs; a signal while it is still loading."""
        try:
            ready = read_status(engine.endpoints).phase == "ready"
        except (OSError, ValueError):
            ready = False
        if not ready or self._error is not None:
            for child in self._children:
                if child.replica == engine.replica:
                    child.signal(signal.SIGTERM)
            return
        outbox = Outbox(engine.endpoints.engine)
        outbox.send(Shutdown(drain_s))
        outbox.close()
