"""Starts a server's processes, wires them, watches them, and ends them. The only place that does.

    with start(config) as running:
        facts = running.wait_ready()
        ...                                 # this process is API worker 0

The engine's ranks, the detokenizer and further API workers are children in process groups of their own, so that Ctrl-C
reaches only this process. However this process ends, they end.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import bough
from bough.config.concerns import Config
from bough.config.hf import checkpoint_of
from bough.core.errors import BoughError, Unavailable
from bough.core.messages import Shutdown
from bough.ipc import (
    Endpoints,
    Launch,
    Outbox,
    Status,
    read_error,
    read_status,
    save_launch,
    write_quarantine,
    write_status,
)
from bough.ipc.endpoints import PrivateDirectory
from bough.observability.crash import make_directory, write_bundle
from bough.observability.flight import RecordedStep, read_flight, suspects
from bough.observability.health import Pulse, State

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
_SETTLE_S = 0.3
"""After one process has died, time for the others to say why they die with it: the first to fail is the cause."""
_ANSWER_S = 1.0
"""Time for API workers to tell waiting clients that the engine is gone."""
_GRACE_S = 5.0
_KILL_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Programs:
    """What the children run, as arguments of the interpreter; the private directory follows."""

    engine: tuple[str, ...] = ("-m", "bough.engine")
    detokenizer: tuple[str, ...] = ("-m", "bough.detokenizer")
    api: tuple[str, ...] = ("-m", "bough.entrypoints.http")


def start(
    config: Config,
    *,
    num_api_workers: int | None = None,
    listen_fds: Sequence[int] = (),
    programs: Programs | None = None,
    quarantine: frozenset[int] = frozenset(),
) -> Running:
    """Finds the model (downloads it if need be) and starts the processes; returns at once, before they are ready.

    `listen_fds` are listening sockets that API workers 1 and up inherit. `quarantine`: fingerprints of requests that the
    engine must refuse. Raises `ConfigError` if there is no such model, or crash bundles could not be written.
    """
    if config.log.crash_dir:
        make_directory(Path(config.log.crash_dir).expanduser())
    return Running(
        located(config),
        num_api_workers=config.server.api_workers if num_api_workers is None else num_api_workers,
        listen_fds=tuple(listen_fds),
        programs=programs or Programs(),
        quarantine=quarantine,
    )


def located(config: Config, progress: Callable[[int, int], None] | None = None) -> Config:
    """The config with a hub id replaced by where it lies, so that no child asks the hub. Downloads it if need be.

    `progress` hears of bytes downloaded, and of bytes in all.
    """
    model = config.model
    checkpoint = checkpoint_of(model, progress)
    if not model.model or Path(model.model).expanduser().exists():
        return config
    named = dataclasses.replace(
        model, model=str(checkpoint.path), served_model_name=model.served_model_name or model.model
    )
    return dataclasses.replace(config, model=named)


class Child:
    """A process of ours."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.process = process

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """To the process and whatever it started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


class Running:
    """A server's processes. Safe to use from several threads."""

    def __init__(
        self,
        config: Config,
        *,
        num_api_workers: int,
        listen_fds: tuple[int, ...],
        programs: Programs,
        quarantine: frozenset[int] = frozenset(),
    ) -> None:
        self.config = config
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
        if quarantine:
            write_quarantine(self.endpoints, quarantine)
        self._pulse = Pulse(self.endpoints.heartbeat)
        self._found_stuck = False
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
        self, progress: Callable[[Status], None] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Waits until the engine takes requests and returns its facts. `progress` hears of every change on the way.

        Raises the error that start-up failed with.
        """
        give_up_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        told: tuple[str, str, float] | None = None
        while True:
            error = self.failed()
            if error is not None:
                raise error
            if self._stopping.is_set():
                raise Unavailable(what="the server was stopped before it was ready")
            status = read_status(self.endpoints)
            news = (status.phase, status.detail, status.progress)
            if progress is not None and news != told and status.phase != "failed":
                progress(status)
            told = news
            if status.phase == "ready":
                break
            if time.monotonic() > give_up_s:
                raise Unavailable(
                    what=f"the engine was not ready within {timeout_s:g} s", why=f"it is {status.detail or 'starting'}"
                )
            time.sleep(0.02)
        self.facts = status.facts
        self._start_api_workers()
        return self.facts

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
            self._private.remove()
            os.close(self._lifeline)
            os.close(self._keep_alive)
            self._stopped.set()
            atexit.unregister(self.stop)

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- starting --------------------------------------------------------------------------------------------------

    def _save_launch(self) -> Launch:
        """For the children that the calling thread is about to start."""
        launch = Launch(
            config=self.config,
            directory=self.endpoints.directory,
            parent_pid=os.getpid(),
            lifeline_fd=self._lifeline,
            die_with_parent_thread=threading.current_thread() is threading.main_thread(),
            listen_fds=self._listen_fds,
            num_api_workers=self._num_api_workers,
        )
        save_launch(launch)
        return launch

    def _start_children(self) -> None:
        launch = self._save_launch()
        directory = self.endpoints.directory
        self._spawn("engine", (*self._programs.engine, directory))
        for rank in range(1, self.config.parallel.tp_size):
            self._spawn(f"rank{rank}", (*self._programs.engine, directory, str(rank)))
        if launch.detokenizes:
            self._spawn("detokenizer", (*self._programs.detokenizer, directory))

    def _start_api_workers(self) -> None:
        with self._lock:
            if self._num_api_workers > 1 and not self._stopping.is_set() and "api1" not in self.pids:
                self._save_launch()
                for worker in range(1, self._num_api_workers):
                    self._spawn(f"api{worker}", (*self._programs.api, self.endpoints.directory, str(worker)))

    def _spawn(self, name: str, arguments: tuple[str, ...]) -> None:
        inherited = (self._lifeline, *self._listen_fds) if name.startswith("api") else (self._lifeline,)
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=inherited,
            process_group=0,
            env=_environment(),
        )
        self._children.append(Child(name, process))

    # -- watching --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            dead = [child for child in self._children if not child.alive]
            if dead:
                self._fail(dead[0])
                return
            if self.config.server.supervise:
                self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """An engine that no longer moves is as good as dead: whoever supervises starts another."""
        beat = self._pulse.read()
        if beat.state is not State.STARTING and beat.age_s > self.config.server.watchdog_timeout_s:
            self._found_stuck = True
            for child in self._children:
                if child.name == "engine":
                    child.signal(signal.SIGKILL)
                    child.process.wait()

    def _fail(self, dead: Child) -> None:
        """One process has died: find the cause, tell everybody, end the others."""
        self._stopping.wait(_SETTLE_S)
        error = self._cause(dead)
        steps = read_flight(self.endpoints.flight)
        self.suspects = suspects(steps)
        with self._lock:
            if self._stopping.is_set():
                return
            self._error = error
            callbacks = list(self._callbacks)
        with contextlib.suppress(OSError):
            write_status(self.endpoints, Status(phase="failed", error=error.sentence()))
        if self.config.log.crash_dir:
            self._write_bundle(dead, error, steps)
        for callback in callbacks:
            callback(error)
        inner = [child for child in self._children if not child.name.startswith("api")]
        for child in inner:
            child.signal(signal.SIGTERM)
        _wait(inner, _KILL_AFTER_S)
        for child in inner:
            child.signal(signal.SIGKILL)
        outer = [child for child in self._children if child.name.startswith("api")]
        if outer and not self._stopping.wait(_ANSWER_S):
            for child in outer:
                child.signal(signal.SIGTERM)

    def _write_bundle(self, dead: Child, error: BoughError, steps: list[RecordedStep]) -> None:
        stacks = {}
        for child in self._children:
            with contextlib.suppress(OSError):
                stacks[child.name] = self.endpoints.fault(child.name).read_text(errors="replace")
        try:
            path = write_bundle(
                Path(self.config.log.crash_dir).expanduser(), process=dead.name, error=error, steps=steps,
                config=self.config, facts=self.facts, stacks=stacks, version=bough.__version__,
            )  # fmt: skip
            _log.error("what is known of the crash is in %s", path)
        except OSError as problem:
            _log.error("the crash bundle could not be written: %s", problem)

    def _cause(self, dead: Child) -> BoughError:
        """The error of the process that failed first; if none left one, how this one ended."""
        if self._found_stuck:
            return BoughError(
                what=f"the engine had not moved for {self.config.server.watchdog_timeout_s:g} s and was ended",
                why="a step hangs, or the machine was stopped",
                fix="a larger --watchdog-timeout allows for slower steps; --safe-mode turns off custom kernels",
            )
        reports = []
        for child in self._children:
            with contextlib.suppress(OSError):
                reports.append((self.endpoints.error(child.name).stat().st_mtime_ns, child.name))
        for _, name in sorted(reports):
            error = read_error(self.endpoints, name)
            if error is not None:
                return error
        return _how_it_ended(dead, self.endpoints)

    # -- ending ----------------------------------------------------------------------------------------------------

    def _end_all(self, drain_s: float) -> None:
        by_name = {child.name: child for child in self._children}
        engine = by_name.get("engine")
        ranks = [child for child in self._children if child.name.startswith("rank")]
        workers = [child for child in self._children if child.name.startswith("api")]
        for worker in workers:
            worker.signal(signal.SIGTERM)
        if engine is not None and engine.alive:
            self._ask_to_end(engine, drain_s)
        _end([*([engine] if engine else []), *ranks], lambda: self._deadline_s)
        detokenizer = by_name.get("detokenizer")
        if detokenizer is not None:
            detokenizer.signal(signal.SIGTERM)
            _end([detokenizer], lambda: time.monotonic())
        _end(workers, lambda: self._deadline_s)

    def _ask_to_end(self, engine: Child, drain_s: float) -> None:
        """A message if its loop runs; a signal while it is still loading."""
        try:
            ready = read_status(self.endpoints).phase == "ready"
        except (OSError, ValueError):
            ready = False
        if not ready or self._error is not None:
            engine.signal(signal.SIGTERM)
            for child in self._children:
                if child.name.startswith("rank"):
                    child.signal(signal.SIGTERM)
            return
        outbox = Outbox(self.endpoints.engine)
        outbox.send(Shutdown(drain_s))
        outbox.close()


def _end(children: Sequence[Child], deadline_s: Callable[[], float]) -> None:
    """Waits until the deadline (which may move), then asks, then kills."""
    try:
        while any(child.alive for child in children) and time.monotonic() < deadline_s():
            time.sleep(0.01)
        for child in children:
            child.signal(signal.SIGTERM)
        _wait(children, _KILL_AFTER_S)
    finally:
        for child in children:
            child.signal(signal.SIGKILL)
            child.process.wait()


def _wait(children: Sequence[Child], patience_s: float) -> None:
    give_up_s = time.monotonic() + patience_s
    while any(child.alive for child in children) and time.monotonic() < give_up_s:
        time.sleep(0.01)


def _environment() -> dict[str, str]:
    """This process's, with the package findable whatever the working directory."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _how_it_ended(dead: Child, endpoints: Endpoints) -> BoughError:
    code = dead.process.returncode
    name = f"the {dead.name} process"
    if code is None or code >= 0:
        return BoughError(
            what=f"{name} ended with status {code}",
            why="it left no reason behind",
            fix="see the lines above; start again with --log-level debug for more",
        )
    try:
        signal_name = signal.Signals(-code).name
    except ValueError:
        signal_name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return BoughError(
            what=f"{name} was killed (SIGKILL)",
            why="somebody killed it, or the system ran out of memory (see `dmesg`)",
            fix="if memory was short, use a smaller --mem-fraction-static, --context-length or model",
        )
    stack = ""
    with contextlib.suppress(OSError):
        stack = endpoints.fault(dead.name).read_text(errors="replace")[:4000]
    error = BoughError(
        what=f"{name} crashed ({signal_name})",
        why="native code failed" + (f": {stack.splitlines()[0]}" if stack else ""),
        fix="try --safe-mode, which turns off custom kernels, graphs and overlap, and report the crash",
    )
    if stack:
        error.add_note(stack)
    return error
