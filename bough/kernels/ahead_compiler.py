"""`python -m bough.kernels.ahead_compiler PROCESSES`: compiles what `bough.kernels.ahead` asks for on standard input.

Imports everything once, then forks for each job. Never touches a GPU: for what it compiles is in the job. A line of output
says that a job has ended, and why not well. Ends with its input, at once, or when it is asked to, after the last job.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import traceback
from collections import deque
from typing import Any

from bough.kernels.ahead import Ask, CudaJob, Job, TritonJob, decode, named

_LATER_NICENESS = 10
"""Of jobs that aren't urgent: the engine serves while they run."""
_ERROR_BYTES = 500


class _Server:
    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._urgent: deque[int] = deque()
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
        while not (self._is_last and not self._running and not self._urgent and not self._later):
            while len(self._running) < self._processes and (self._urgent or self._later):
                self._begin()
            for key, _ in self._selector.select():
                if key.fd == 0:
                    self._take()
                else:
                    self._end(key.fd)

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
        ask: Ask = decode(line)
        if ask.number < 0:
            self._is_last = True
        elif ask.job is not None:
            self._jobs[ask.number] = ask.job
            (self._urgent if ask.urgent else self._later).append(ask.number)
        elif ask.number in self._later or ask.number in self._urgent:
            (self._later if ask.number in self._later else self._urgent).remove(ask.number)
            self._urgent.appendleft(ask.number)

    def _begin(self) -> None:
        urgent = bool(self._urgent)
        number = (self._urgent if urgent else self._later).popleft()
        ours, theirs = os.pipe()
        process = os.fork()
        if process == 0:
            _work(self._jobs[number], theirs, _LATER_NICENESS * (not urgent))
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
        os.write(1, b"%d %s\n" % (number, b" ".join(error.split())))


def _work(job: Job, pipe: int, niceness: int) -> None:
    """The whole life of a forked process."""
    error = b""
    try:
        os.nice(niceness)
        sys.stdout = sys.stderr
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
    _import()
    _Server(int(sys.argv[1])).run()


if __name__ == "__main__":
    main()
