"""Kernels compiled ahead of their first launch, in other processes, by which a first start takes as long as its slowest
kernel instead of as long as all of them.

Which forms of which kernels a step launches is known to the code that launches them. So steps are rehearsed: they run as
always, but in a `Rehearsal` no kernel of ours is launched, and those that aren't compiled are asked for instead. Later, a
launch whose kernel has been asked for waits for it and finds it in the caches on disk.

    start(processes)               # as early as possible: the compilers take seconds to import what they need
    with Rehearsal(urgent=True):   # what the next launches need; not `urgent`: what later ones may
        ...
    finish()                       # the compilers end when they have nothing left to do

Where nothing was started, a launch compiles what it needs, as it does where a compiler failed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

_log = logging.getLogger("bough.kernels")

_MOST_WAITED_S = 300.0
"""For one kernel. The slowest takes half a minute on a core of its own; compilers that take longer hang."""

T = TypeVar("T")


class TritonJob(NamedTuple):
    """One form of a Triton kernel, as `triton.compile` takes it."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: tuple[str, Any, int]
    options: dict[str, Any]


class CudaJob(NamedTuple):
    """One form of a CUDA source, as `cached_cubin` takes it."""

    path: str
    architecture: str
    defines: dict[str, int]


Job = TritonJob | CudaJob


class Ask(NamedTuple):
    """What a compiler is sent: a job, or that one is waited for, or that none follow."""

    number: int
    job: Job | None
    urgent: bool


class Compilers:
    """Processes that compile for this one. Each job is done once."""

    def __init__(self, processes: int, most_waited_s: float = _MOST_WAITED_S) -> None:
        command = [sys.executable, "-m", "bough.kernels.ahead_compiler", str(processes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )  # fmt: skip
        self._most_waited_s = most_waited_s
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, AttributeError):  # the default holds fewer jobs than come while it imports
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._lock = threading.Lock()
        self._numbers: dict[object, int] = {}
        self._ended: list[threading.Event] = []
        self._pending = 0
        self.failed = 0
        """Jobs that were not done: their kernels are compiled at their launch."""
        self._is_finished = False
        self._then: Callable[[], None] | None = None
        self._reader = threading.Thread(target=self._read, name="compilers", daemon=True)
        self._reader.start()

    @property
    def pending(self) -> int:
        """Jobs that have not ended."""
        return self._pending

    @property
    def asked(self) -> int:
        return len(self._ended)

    def is_pending(self, first: int) -> bool:
        """Whether one of the `first` jobs has not ended."""
        return not all(ended.is_set() for ended in self._ended[:first])

    def ask(self, key: object, job: Job, *, urgent: bool) -> None:
        """Has a job done, unless one with this key was asked for before."""
        with self._lock:
            if key in self._numbers or self._is_finished:
                return
            number = len(self._ended)
            try:
                line = encode(Ask(number, job, urgent))
            except TypeError as error:
                _log.info("a kernel is compiled at its first launch: %s", error)
                return
            self._numbers[key] = number
            self._ended.append(threading.Event())
            self._pending += 1
            self._send(line)

    def wait(self, key: object) -> None:
        """Until a job has ended, well or not; at once if it was never asked for. Compilers that take too long over it are
        ended."""
        number = self._numbers.get(key)
        if number is None or self._ended[number].is_set():
            return
        with self._lock:
            self._send(encode(Ask(number, None, urgent=True)))
        if not self._ended[number].wait(self._most_waited_s):
            _log.warning("compilers were ended: a kernel took them more than %.0f s", self._most_waited_s)
            with contextlib.suppress(OSError):  # the group of a session, with all that they have started
                os.killpg(self._process.pid, signal.SIGKILL)
            self._ended[number].wait()

    def finish(self, then: Callable[[], None] | None = None) -> None:
        """Asks for nothing more. `then` is called, in another thread, once all jobs are done, if none has failed."""
        with self._lock:
            self._then = then
            self._is_finished = True
            self._send(encode(Ask(-1, None, urgent=False)))

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, and the reader says so
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self) -> None:
        """Hears of jobs that have ended, until the process has."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, _, error = line.decode(errors="replace").strip().partition(" ")
            if not number.isdecimal() or int(number) >= len(self._ended):
                continue  # printed by something before the compilers began
            if error:
                _log.info("a kernel is compiled at its first launch: %s", error)
            self._end(int(number), failed=bool(error))
        with self._lock:
            self._is_finished = True
        for left, ended in enumerate(self._ended):
            if not ended.is_set():
                self._end(left, failed=True)
        self._process.wait()
        if self._then is not None and not self.failed:
            self._then()

    def _end(self, number: int, *, failed: bool) -> None:
        with self._lock:
            self._pending -= 1
            self.failed += failed
        self._ended[number].set()


def encode(ask: Ask) -> bytes:
    """One line. Raises TypeError for a job with something in it that can't be named."""
    job = ask.job
    kind = None if job is None else type(job).__name__
    return json.dumps([ask.number, ask.urgent, kind, None if job is None else _plain(tuple(job))]).encode() + b"\n"


def decode(line: bytes) -> Ask:
    """What `encode` has made."""
    number, urgent, kind, fields = json.loads(line)
    kinds: dict[str, type[Job]] = {"TritonJob": TritonJob, "CudaJob": CudaJob}
    return Ask(number, None if kind is None else kinds[kind](*_made(fields)), urgent)


def _plain(value: Any) -> Any:
    """In JSON's terms: what it doesn't know is an object with one field, which says what it is."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return {kind.__name__: [_plain(each) for each in value]}
    if kind is dict:
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    from triton import language
    from triton.runtime.jit import JITFunction

    if kind is language.dtype:
        return {"dtype": value.name}
    if kind is language.constexpr:
        return {"constexpr": _plain(value.value)}
    if isinstance(value, JITFunction):  # which may be a constant of another one
        return {"function": [value.fn.__module__, value.fn.__qualname__]}
    raise TypeError(f"{kind.__name__} in a kernel's form")


def _made(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind in ("list", "tuple"):
        made = [_made(each) for each in value]
        return tuple(made) if kind == "tuple" else made
    if kind == "dict":
        return {_made(key): _made(each) for key, each in value}
    if kind == "function":
        return named(*value)
    from triton import language

    return language.dtype(value) if kind == "dtype" else language.constexpr(_made(value))


def named(module: str, name: str) -> Any:
    """A module's function. Only of ours: others are not compiled ahead."""
    if not module.startswith("bough."):
        raise TypeError(f"{module} is not compiled ahead")
    return getattr(importlib.import_module(module), name)


_compilers: Compilers | None = None
_rehearsal: Rehearsal | None = None
_forgetting: list[Callable[[], None]] = []
"""Called at the end of a rehearsal."""
_original_compile: Callable[..., Any] | None = None


def start(processes: int) -> None:
    """Starts the compilers, unless there are some."""
    global _compilers
    if _compilers is None:
        try:
            _compilers = Compilers(processes)
        except OSError as error:
            _log.info("kernels are compiled at their first launch: %s", error)


def finish(then: Callable[[], None] | None = None) -> None:
    """As `Compilers.finish`."""
    if _compilers is not None:
        _compilers.finish(then)


def compilers() -> Compilers | None:
    """None: none were started."""
    return _compilers


def pending() -> int:
    """Kernels that are being compiled, or wait for that."""
    return 0 if _compilers is None else _compilers.pending


def is_rehearsing() -> bool:
    return _rehearsal is not None


def rehearsed(cached: T) -> T:
    """A function with `functools.cache` whose results are forgotten after a rehearsal: they may be of kernels that aren't
    there yet."""
    forget_after_rehearsals(cached.cache_clear)  # type: ignore[attr-defined]
    return cached


def forget_after_rehearsals(forget: Callable[[], None]) -> None:
    """As `rehearsed`, for what is kept otherwise."""
    _forgetting.append(forget)


def asks_for_cubin(key: object, path: Path, architecture: str, defines: Mapping[str, int]) -> bool:
    """In a rehearsal, asks for a source that isn't compiled; otherwise waits for it, if it has been asked for."""
    if _compilers is None:
        return False
    if _rehearsal is not None:
        _compilers.ask(key, CudaJob(str(path), architecture, dict(defines)), urgent=_rehearsal.urgent)
        return True
    _compilers.wait(key)
    return False


class Rehearsal:
    """While it is entered, no kernel of ours is launched, and those that aren't compiled are asked for. Only one thread may
    launch any.

    torch's own operations run. They never see more of what the kernels would have left than zeros, because new tensors
    have nothing else in them: no index points outside.
    """

    def __init__(self, *, urgent: bool) -> None:
        """`urgent`: before those that aren't."""
        assert _compilers is not None, "there are compilers"
        self.urgent = urgent
        self._asked: list[tuple[dict[Any, Any], Any]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Rehearsal:
        global _rehearsal
        assert _rehearsal is None, "one at a time"
        _install()
        from triton.runtime.jit import JITFunction

        from bough.kernels.zeroed import Zeroed

        run = JITFunction.run

        def only_bind(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return run(function, *args, grid=grid, warmup=True, **kwargs)

        def give_back() -> None:
            JITFunction.run = run

        self._stack.callback(give_back)
        JITFunction.run = only_bind
        self._stack.enter_context(Zeroed())  # type: ignore[no-untyped-call]
        _rehearsal = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _rehearsal
        _rehearsal = None
        self._stack.close()
        for kernels, key in self._asked:
            del kernels[key]
        for forget in _forgetting:
            forget()

    def ask(self, function: Any, key: Any, device: int, job: TritonJob) -> Any:
        """Asks for a kernel. Until the end of the rehearsal, Triton takes it for compiled."""
        assert _compilers is not None, "there are compilers"
        _compilers.ask((job.module, job.name, key), job, urgent=self.urgent)
        kernels = function.device_caches[device][0]
        kernels[key] = _NOT_YET
        self._asked.append((kernels, key))
        return _NOT_YET


_NOT_YET = object()


def _install() -> None:
    """Has Triton come here before it compiles anything."""
    global _original_compile
    if _original_compile is not None:
        return
    from triton.runtime.jit import JITFunction

    _original_compile = JITFunction._do_compile
    JITFunction._do_compile = _compile


def _compile(
    self: Any, key: Any, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
) -> Any:
    """In place of `JITFunction._do_compile`."""
    assert _original_compile is not None, "it is installed"
    module, name = self.fn.__module__, self.fn.__qualname__
    if _rehearsal is not None:
        target = self.device_caches[device][2]
        given = (target.backend, target.arch, target.warp_size)
        job = TritonJob(module, name, signature, constexprs, attrs, given, dict(options.__dict__))
        return _rehearsal.ask(self, key, device, job)
    if _compilers is not None:
        _compilers.wait((module, name, key))
    return _original_compile(self, key, signature, device, constexprs, options, attrs, warmup)


def read_triton() -> None:
    """Has Triton read all of its own files, by a hash of which it looks kernels up, in another thread: that takes half a
    second, which the first launch would wait for."""

    def read() -> None:
        with contextlib.suppress(ImportError):
            from triton.runtime.cache import triton_key

            triton_key()

    threading.Thread(target=read, name="triton", daemon=True).start()


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
