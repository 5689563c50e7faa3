"""The process that first compiles grammars: `python -m bough.grammar.worker`. If it runs out of memory, hangs or
crashes it is killed, without effect on the engine. It imports neither torch nor transformers."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sys
import time

import numpy as np

from bough.core.sampling import GrammarKind
from bough.grammar.backend import GrammarBackend, Program, make_backend
from bough.grammar.errors import BadGrammar, shorten
from bough.grammar.frames import CompileJob, CompileResult, CompilerStart, Ready, read_frame, write_frame
from bough.grammar.vocabulary import WorkerVocabulary

_PR_SET_PDEATHSIG = 1
_WALKS, _STEPS = 3, 12
SLOW_STEP_S = 0.25
"""Seconds: a grammar with a mask that takes longer is refused, because it would delay the next token of all
requests."""


def main() -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    start = read_frame(source, CompilerStart)
    try:
        backend = make_backend(start.settings, start.tokens, lean=True)
        try_out(backend, start.tokens, "regex", "[a-z]{1,8}")
        _limit_memory(start.settings.memory_limit_bytes)
    except Exception as error:
        write_frame(sink, Ready(error=f"{type(error).__name__}: {error}"))
        return 1
    write_frame(sink, Ready())
    while True:
        try:
            job = read_frame(source, CompileJob)
        except EOFError:
            return 0
        write_frame(sink, _answer(backend, start, job))


def _answer(backend: GrammarBackend, start: CompilerStart, job: CompileJob) -> CompileResult:
    try:
        return CompileResult(program=try_out(backend, start.tokens, job.kind, job.source))
    except BadGrammar as error:
        return CompileResult(error=shorten(str(error), 1000))
    except MemoryError:
        return CompileResult(error=out_of_memory(start.settings.memory_limit_bytes))
    except RecursionError:
        return CompileResult(error="the grammar is nested too deep")
    except Exception as error:
        return CompileResult(error=f"the grammar can't be used: {shorten(str(error), 300)}")


def out_of_memory(limit_bytes: int) -> str:
    return f"the grammar needs more than {limit_bytes // 2**20} MiB to compile; make it smaller"


def try_out(backend: GrammarBackend, tokens: WorkerVocabulary, kind: GrammarKind, source: str) -> Program:
    """Compiles a source and tries a few random answers. Raises `BadGrammar` if that fails or is too slow."""
    program = backend.translate(kind, source)
    compiled = backend.compile(program)
    mask = np.empty(-(-tokens.size // 32), np.int32)
    dice = random.Random(0)
    for _ in range(_WALKS):
        matcher = compiled.matcher()
        for _ in range(_STEPS):
            began = time.process_time()
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokens.size])
            following = [
                int(i) for i in dice.sample(allowed.tolist(), min(4, len(allowed))) if i not in tokens.stop_ids
            ]
            if not len(allowed):
                raise BadGrammar("the grammar comes to a place where no token of this model can follow")
            if following and not matcher.accept(following[0]):
                raise BadGrammar("the grammar contradicts itself")
            if time.process_time() - began > SLOW_STEP_S:
                raise BadGrammar(f"the grammar takes more than {SLOW_STEP_S} s for a token; make it simpler")
            if not following:
                break
    return program


def _limit_memory(extra_bytes: int) -> None:
    """Limits the address space of this process to its present size plus `extra_bytes`."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra_bytes, now + extra_bytes))


if __name__ == "__main__":
    sys.exit(main())
