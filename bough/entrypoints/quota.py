"""Rate limits shared by several API workers: one token bucket per name, in a file that all of them map.

A bucket holds at most a minute's worth and fills evenly. Workers take turns by a lock on the file (about two microseconds),
so that a client gets its rate whichever workers its connections meet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_SLOT = struct.Struct("<16sdd")
"""Digest of the name, what is in the bucket, when it was looked at (time.monotonic(), which all processes share)."""
_NUM_SLOTS = 4096
_PROBES = 16
"""Number of slots in which a name may be stored. If all are taken, the least recently used entry is replaced."""


class Rates:
    """The buckets of one server. Without a path they are this process's own."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = -1
        size = _SLOT.size * _NUM_SLOTS
        if path is None:
            self._slots: mmap.mmap | bytearray = bytearray(size)
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, size)
        self._slots = mmap.mmap(self._file, size)

    def take(self, name: str, amount: float, per_minute: int, *, overdraw: bool = False) -> float:
        """Takes `amount` and returns 0; or takes nothing and returns the seconds after which to try again.

        `overdraw`: anything may be taken from a bucket that is not empty, however much; what is missing is waited for
        afterwards.
        """
        with self._bucket(name, per_minute) as bucket:
            needed = min(1.0, amount) if overdraw else amount
            if bucket.level >= needed:
                bucket.level -= amount
                return 0.0
            return 60.0 * (needed - bucket.level) / per_minute

    def use(self, name: str, amount: float, per_minute: int) -> None:
        """Takes `amount` regardless of the bucket's content; a negative amount is returned to it."""
        with self._bucket(name, per_minute) as bucket:
            bucket.level -= amount

    @contextlib.contextmanager
    def _bucket(self, name: str, per_minute: int) -> Iterator[_Bucket]:
        """The bucket as it is now; as it is at the end of the block, it is put back."""
        mark = hashlib.blake2b(name.encode(), digest_size=16).digest()
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            at, level, looked_s = self._find(mark)
            now = self._clock()
            filled = float(per_minute) if not looked_s else level + (now - looked_s) * per_minute / 60
            bucket = _Bucket(min(filled, float(per_minute)))
            yield bucket
            _SLOT.pack_into(self._slots, at, mark, bucket.level, now)
        finally:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _find(self, mark: bytes) -> tuple[int, float, float]:
        """Where the bucket lies, what it holds, and when it was looked at; 0: it is new."""
        first = int.from_bytes(mark[:4], "little")
        oldest, oldest_s = 0, float("inf")
        for probe in range(_PROBES):
            at = (first + probe) % _NUM_SLOTS * _SLOT.size
            found, level, looked_s = _SLOT.unpack_from(self._slots, at)
            if found == mark:
                return at, level, looked_s
            if looked_s < oldest_s:
                oldest, oldest_s = at, looked_s
        return oldest, 0.0, 0.0


class _Bucket:
    __slots__ = ("level",)

    def __init__(self, level: float) -> None:
        self.level = level
