"""The engine's heartbeat: a few numbers in a shared file that others read without asking the engine.

The writer beats once a loop (about a microsecond); a reader sees how old the last beat is, so that an engine that hangs
looks different from one that is busy, and a probe costs the engine nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_BEAT = struct.Struct("<QqIIII")
"""steps, monotonic ns, state, running, waiting, pid"""
_SLOTS = (64, 128)
"""Where beats lie, by turns. The file begins with the number of beats so far, written last, in one store: the beat it
names is whole, and stays so until the next but one begins."""
_SIZE = 4096


class State(IntEnum):
    STARTING = 0
    READY = 1
    PAUSED = 2
    DRAINING = 3
    ENDED = 4


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading."""

    steps: int
    age_s: float
    """Seconds since the engine's loop last came round; infinite before its first beat."""
    state: State
    num_running: int
    num_waiting: int
    pid: int


class Heartbeat:
    """The writing end; one writer a file."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._num_beats = memoryview(self._map).cast("Q")
        self._count = 0
        self._pid = os.getpid()

    def beat(self, steps: int, state: State, num_running: int = 0, num_waiting: int = 0) -> None:
        self._count += 1
        place = _SLOTS[self._count & 1]
        _BEAT.pack_into(self._map, place, steps, time.monotonic_ns(), state, num_running, num_waiting, self._pid)
        self._num_beats[0] = self._count


class Pulse:
    """The reading end."""

    def __init__(self, path: Path) -> None:
        """Makes the file if the writer has not come yet."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._num_beats = memoryview(self._map).cast("Q")

    def read(self) -> Beat:
        """The last complete beat; asks nobody, waits for nobody."""
        while True:
            count = self._num_beats[0]
            steps, at_ns, state, running, waiting, pid = _BEAT.unpack_from(self._map, _SLOTS[count & 1])
            if self._num_beats[0] == count:
                break
        age_s = (time.monotonic_ns() - at_ns) / 1e9 if count else float("inf")
        return Beat(steps, age_s, State(state), running, waiting, pid)
