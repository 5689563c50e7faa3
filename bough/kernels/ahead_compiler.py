"""`python -m bough.kernels.ahead_compiler PROCESSES`: compiles what `bough.kernels.ahead` asks for on standard input.

Imports everything once, then forks for each job. Never touches a GPU: for what it compiles is in the job. A line of output
says that a job has ended, and why not well. Ends with its input, at once, or when it is asked to, after the last job.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import traceback
from collections import deque
from heapq import heapify, heappop, heappush
from typing import Any

from bough.kernels.ahead import Ask, CudaJob, Job, TritonJob, decode, named

_LATER_NICENESS = 10
"""Of jobs that aren't urgent: the engine serves while they run."""
_ERROR_BYTES = 500
_TRITON_COST = 15_000
"""See `_cost`: about a second, as most of ours and their launchers take."""


class _Server:
    def __init__(self, processes: int, output: int = 1) -> None:
        """`output`: a descriptor."""
        self._processes = processes
        self._output = output
        self._awaited: deque[int] = deque()
        self._urgent: list[tuple[int, int]] = []
        """A heap of (minus cost, number)."""
        self._later: deque[int] = deque()
        self._jobs: dict[int, Job] = {}
        self._running: dict[int, tuple[int, int]] = {}
        """By the descriptor of its pipe: a job's process and number."""
        self._selector = selectors.DefaultSelector()
        self._input = b""
        self._is_last = False

    def run(self) -> None:
        """Until there is nothing left to do."""
        self._selector.register(0, selectors.EVENT_READ)
        while not (self._is_last and not (self._running or self._awaited or self._urgent or self._later)):
            self._start_some()
            for key, _ in self._selector.select():
                if key.fd == 0:
                    self._take()
                else:
                    self._end(key.fd)

    def _start_some(self) -> None:
        """Those that are awaited, at once: what runs otherwise has a lower priority, or is awaited as well. Others as far as
        there are processes for them."""
        while self._awaited:
            self._begin(self._awaited.popleft(), 0)
        while len(self._running) < self._processes and (self._urgent or self._later):
            if self._urgent:
                self._begin(heappop(self._urgent)[1], 0)
            else:
                self._begin(self._later.popleft(), _LATER_NICENESS)

    def _take(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            for process, _ in self._running.values():
                os.kill(process, signal.SIGKILL)
            os._exit(0)
        self._input += data
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            self._note(line)

    def _note(self, line: bytes) -> None:
        try:
            ask: Ask = decode(line)
        except Exception:  # of a job that names what isn't here
            self._say(json.loads(line)[0], traceback.format_exc(limit=-1).encode()[-_ERROR_BYTES:])
            return
        if ask.number < 0:
            self._is_last = True
        elif ask.job is not None:
            self._jobs[ask.number] = ask.job
            if ask.urgent:
                heappush(self._urgent, (-_cost(ask.job), ask.number))
            else:
                self._later.append(ask.number)
        else:
            self._await(ask.number)

    def _await(self, number: int) -> None:
        """The engine waits for this one now."""
        urgent = [number for _, number in self._urgent]
        if number in self._later:
            self._later.remove(number)
            self._awaited.append(number)
        elif number in urgent:
            del self._urgent[urgent.index(number)]
            heapify(self._urgent)
            self._awaited.append(number)
        for process, running in self._running.values():
            if running == number:
                with contextlib.suppress(OSError):  # only root may
                    os.setpriority(os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, 0))

    def _begin(self, number: int, niceness: int) -> None:
        ours, theirs = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(self._output)  # which ends when the server does
            _work(self._jobs[number], theirs, niceness)
        os.close(theirs)
        self._running[ours] = process, number
        self._selector.register(ours, selectors.EVENT_READ)

    def _end(self, pipe: int) -> None:
        error = os.read(pipe, _ERROR_BYTES)
        self._selector.unregister(pipe)
        os.close(pipe)
        process, number = self._running.pop(pipe)
        _, status = os.waitpid(process, 0)
        if status and not error:
            error = f"a compiler ended with {os.waitstatus_to_exitcode(status)}".encode()
        self._say(number, error)

    def _say(self, number: int, error: bytes) -> None:
        os.write(self._output, b"%d %s\n" % (number, b" ".join(error.split())))


def _cost(job: Job) -> int:
    """In bytes of a CUDA source that takes as long. Only an order: the longest begin first."""
    if isinstance(job, CudaJob):
        with contextlib.suppress(OSError):
            return os.stat(job.path).st_size
    return _TRITON_COST


def _work(job: Job, pipe: int, niceness: int) -> None:
    """The whole life of a forked process."""
    error = b""
    try:
        os.nice(niceness)
        compile_job(job)
    except BaseException:
        error = "".join(traceback.format_exc(limit=-1)).encode()[-_ERROR_BYTES:]
    os.write(pipe, error)
    os._exit(1 if error else 0)


def compile_job(job: Job) -> None:
    """Leaves what a job asks for in the caches on disk."""
    if isinstance(job, CudaJob):
        from pathlib import Path

        from bough.kernels.cuda_source import cached_cubin

        cached_cubin(Path(job.path), job.architecture, job.defines)
        return
    compiled = _compiled(job)
    if job.target[0] == "cuda":
        _build_launcher(compiled)


def _compiled(job: TritonJob) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(named(job.module, job.name), job.signature, job.constants, job.attributes)
    return triton.compile(source, target=GPUTarget(*job.target), options=job.options)


def _build_launcher(compiled: Any) -> None:
    """Some versions of Triton have a C compiler make a function that launches a kernel, one per signature, which takes as
    long as a small kernel. Where that can't be done here, the engine does it."""
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
    except Exception:
        pass


def _import() -> None:
    """What jobs need. Forked processes have it at once."""
    begun = os.fork()
    if begun == 0:
        try:
            from triton.backends.nvidia.driver import CudaUtils

            CudaUtils()  # which a C compiler makes
        finally:
            os._exit(0)
    from triton.runtime.cache import triton_key

    import bough.kernels.attention.triton_backend
    import bough.kernels.cuda_source
    import bough.kernels.sampling.triton

    triton_key()
    with contextlib.suppress(bough.kernels.cuda_source.CudaSourceError):
        bough.kernels.cuda_source.find_nvrtc()
    os.waitpid(begun, os.WNOHANG)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine ends it
    output = os.dup(1)
    os.dup2(2, 1)  # what compilers and imports may print is no answer
    _import()
    _Server(int(sys.argv[1]), output).run()


if __name__ == "__main__":
    main()
