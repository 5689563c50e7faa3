"""Heartbeats: a few numbers in a shared file, which other processes read without asking the writer.

The engine, the detokenizer and the API workers each write a heartbeat in every iteration of their loop (about a
microsecond). A reader sees the age of the last heartbeat, so that it can distinguish a process that hangs from one that
is busy, and a probe costs the process nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

_BEAT = struct.Struct("<QqIIIIq")
"""steps, monotonic ns, state, running, waiting, pid, begun"""
_SLOTS = (64, 128)
"""Offsets of two slots that are written alternately. The file begins with the number of heartbeats so far, which is
written last, in one store: the slot that it names is complete, and stays so until the write after the next one."""
_SIZE = 4096
_LIVELY_S = 60.0
"""Seconds without a heartbeat after which one of several engines is left out."""


class State(IntEnum):
    STARTING = 0
    READY = 1
    PAUSED = 2
    DRAINING = 3
    ENDED = 4


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading of a heartbeat."""

    steps: int
    age_s: float
    """Seconds since the last iteration of the process's loop; infinite before the first."""
    state: State
    num_running: int
    num_waiting: int
    pid: int
    num_begun: int = 0
    """Of the engine: number of requests that have left the queue so far."""


class Heartbeat:
    """The writing end; one writer per file."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._num_beats = memoryview(self._map).cast("Q")
        self._count = self._num_beats[0]  # an earlier process may have written this file
        self._pid = os.getpid()

    def beat(self, steps: int, state: State, num_running: int = 0, num_waiting: int = 0, num_begun: int = 0) -> None:
        self._count += 1
        place = _SLOTS[self._count & 1]
        now_ns = time.monotonic_ns()
        _BEAT.pack_into(self._map, place, steps, now_ns, state, num_running, num_waiting, self._pid, num_begun)
        self._num_beats[0] = self._count


class Pulses:
    """The reading end of several engines that serve as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._pulses = [Pulse(path) for path in paths]

    def read(self) -> Beat:
        """The newest heartbeat, with the requests of all engines."""
        beats = [pulse.read() for pulse in self._pulses]
        first = min(beats, key=lambda beat: beat.age_s)
        if len(beats) == 1:
            return first
        lively = [beat for beat in beats if beat.age_s < _LIVELY_S]
        running, waiting = sum(beat.num_running for beat in lively), sum(beat.num_waiting for beat in lively)
        begun = sum(beat.num_begun for beat in beats)
        return replace(first, num_running=running, num_waiting=waiting, num_begun=begun)


class Pulse:
    """The reading end."""

    def __init__(self, path: Path) -> None:
        """Makes the file if the writer has not started yet."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._num_beats = memoryview(self._map).cast("Q")

    def read(self) -> Beat:
        """Returns the last complete heartbeat, without waiting for the writer."""
        while True:
            count = self._num_beats[0]
            steps, at_ns, state, running, waiting, pid, begun = _BEAT.unpack_from(self._map, _SLOTS[count & 1])
            if self._num_beats[0] == count:
                break
        age_s = (time.monotonic_ns() - at_ns) / 1e9 if count else float("inf")
        return Beat(steps, age_s, State(state), running, waiting, pid, begun)
