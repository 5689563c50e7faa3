"""A worker process with limits: started when needed, killed when it takes too long."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil

from bough.core.sampling import GrammarKind
from bough.grammar.backend import Program, Settings
from bough.grammar.errors import BadGrammar
from bough.grammar.frames import CompileJob, CompileResult, CompilerStart, Ready, read_frame, write_frame
from bough.grammar.vocabulary import WorkerVocabulary
from bough.grammar.worker import out_of_memory

_START_LIMIT_S = 60.0
_PATIENCE = 4
"""Factor on the time limit for wall time: on a busy machine a worker may take this many times its limit, while its CPU
time stays within the limit."""
_LOOK_EVERY_S = 0.1


class Broken(Exception):
    """The worker can't be started: no grammar can be compiled."""


class Overrun(BadGrammar):
    """The worker was killed. The same source might pass on a less busy machine."""


class Sandbox:
    """One worker process. Not for several threads."""

    def __init__(self, settings: Settings, tokens: WorkerVocabulary) -> None:
        self._settings = settings
        self._tokens = tokens
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Makes sure that the process runs and is ready. Raises `Broken`."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        home = str(Path(__file__).parents[2])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "MALLOC_ARENA_MAX": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bough.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            write_frame(self._stdin, CompilerStart(self._settings, self._tokens))
            ready = read_frame(self._stdout, Ready, time.monotonic() + _START_LIMIT_S)
        except (OSError, EOFError, TimeoutError) as error:
            self.stop()
            raise Broken(f"the grammar worker did not start: {type(error).__name__}") from None
        if ready.error:
            self.stop()
            raise Broken(f"the grammar worker did not start: {ready.error}")

    def compile(self, kind: GrammarKind, source: str) -> Program:
        """Lets the worker try a source within the limits. Raises `BadGrammar` (`Overrun` if the worker was killed),
        `Broken`."""
        self.start()
        limit_s = self._settings.time_limit_s
        try:
            write_frame(self._stdin, CompileJob(kind, source))
            self._await_answer(limit_s)
            done = read_frame(self._stdout, CompileResult, time.monotonic() + limit_s)
        except TimeoutError:
            self.stop()
            raise Overrun(f"the grammar takes more than {limit_s:g} s to compile; make it smaller") from None
        except (OSError, EOFError):
            self.stop()
            raise Overrun(out_of_memory(self._settings.memory_limit_bytes)) from None
        if done.program is None:
            raise BadGrammar(done.error)
        return done.program

    def _await_answer(self, limit_s: float) -> None:
        """Waits until the worker sends a message or ends. Raises `TimeoutError` when its time is up."""
        began, computed_s = time.monotonic(), self._computed_s()
        while not select.select([self._stdout], [], [], min(limit_s, _LOOK_EVERY_S))[0]:
            waited_s = time.monotonic() - began
            if waited_s > limit_s and (
                waited_s > _PATIENCE * limit_s or self._computed_s() - computed_s > 0.8 * limit_s
            ):
                raise TimeoutError

    def _computed_s(self) -> float:
        """CPU seconds that the worker has used."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def stop(self) -> None:
        """Ends the process at once, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()

    @property
    def _stdin(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def _stdout(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()
