"""A ring of frames in shared memory: one writer, many readers, each of which sees every frame.

A message is encoded and copied once for all readers. The writer waits only if the slowest reader is a whole ring
behind. Messages that are longer than the ring are split into several frames.
"""

from __future__ import annotations

import struct
import time
from typing import Any, Final, Generic, TypeVar

from bough.core.errors import Unavailable
from bough.ipc.codec import Codec, encoder
from bough.ipc.segment import Segment
from bough.platform.futex import futex_wait, futex_wake

T = TypeVar("T")

RING_BYTES = 1 << 24
_LINE = 64
_HEAD_AT: Final = 0
"""In the first line: how many bytes were ever written. Readers sleep at the lower half of that number, which changes with
each frame; the kernel compares it once more before it lets a reader sleep, so that no wake-up is lost."""
_LOWER: Final = 0xFFFFFFFF
_TAIL_AT: Final = 0
"""In each reader's line: how many bytes it has read."""
_FRAME = struct.Struct("<Q")
_length_bytes = _FRAME.pack
_ALIGN = 8
_SKIP = (1 << 64) - 1
"""Instead of a length: the rest of the ring is unused, continue at its beginning."""
_MORE = 1 << 63
"""Bit in a length: the next frame continues this message."""
_NAP_S = 0.5
"""Seconds after which a sleeping reader looks again, even if it was not woken."""
_WAKES = 2
"""Number of other readers that a reader wakes when it is woken: all are awake after log2(readers) rounds."""
_FULL_PAUSE_S = 50e-6
_HOT_BYTES = 1 << 16
"""Behind this many bytes the writer starts over if all readers have kept up: by then the beginning of the ring is in caches
and page tables. The rest is not, and writing there takes several times as long."""


def ring_bytes(num_readers: int, capacity: int = RING_BYTES) -> int:
    """Size of a ring's segment."""
    return _data_at(num_readers) + capacity


def _data_at(num_readers: int) -> int:
    return -(-(1 + num_readers) * _LINE // 4096) * 4096


class _Ring:
    def __init__(self, segment: Segment, num_readers: int) -> None:
        self.segment = segment
        whole = memoryview(segment.memory)
        begin = _data_at(num_readers)
        self.data = whole[begin:]
        self.capacity = len(self.data)
        self.begin = begin
        self.numbers = whole[:begin].cast("Q")


class RingWriter:
    """The writing end. One thread."""

    def __init__(self, num_readers: int, *, capacity: int = RING_BYTES, timeout_s: float = 600.0) -> None:
        """`timeout_s`: maximum seconds to wait for a reader while the ring is full."""
        self._segment = Segment.create(ring_bytes(num_readers, capacity))
        self._ring = _Ring(self._segment, num_readers)
        self._timeout_s = timeout_s
        self._encode = encoder().encode
        self._head = 0
        self._free_until = self._ring.capacity
        """Position up to which can be written without reading the readers' positions again."""
        self._tails = self._ring.numbers[(_LINE + _TAIL_AT) // 8 : (1 + num_readers) * _LINE // 8 : _LINE // 8]
        """By reader, how far it has read."""
        self._quick_until = 0
        """Frames that end at or before this position are written without any look at the ring..."""
        self._memory = self._segment.memory
        self._shift = 0
        """...to this place in memory, counted from their position."""
        self._numbers = self._ring.numbers
        self._word = self._segment.address + _HEAD_AT

    @property
    def path(self) -> str:
        """Path by which readers open the ring."""
        return self._segment.path

    def send(self, message: Any) -> None:
        """Encodes a struct and sends it to all readers. Raises `Unavailable` if one of them has stopped reading."""
        self.send_encoded(self._encode(message))

    def send_encoded(self, frame: bytes) -> None:
        head, length = self._head, len(frame)
        end = head + _FRAME.size + length
        if end > self._quick_until:
            self._send_slowly(frame)
            return
        at = head + self._shift
        self._memory[at : end + self._shift] = _length_bytes(length) + frame
        self._head = self._numbers[0] = (end + _ALIGN - 1) & -_ALIGN
        futex_wake(self._word, 1)  # a woken reader wakes others: this thread has other work

    def _send_slowly(self, frame: bytes) -> None:
        ring = self._ring
        longest = ring.capacity // 4
        for begin in range(0, len(frame), longest):
            part = frame[begin : begin + longest] if len(frame) > longest else frame
            self._put(part, more=begin + longest < len(frame))
        self._publish()
        lap = self._head - self._head % ring.capacity
        self._quick_until = min(self._free_until - _ALIGN, lap + min(_HOT_BYTES, ring.capacity))
        self._shift = ring.begin - lap

    def close(self) -> None:
        self._segment.close()

    def _put(self, part: bytes, *, more: bool) -> None:
        ring = self._ring
        need = _FRAME.size + len(part)
        at = self._head % ring.capacity
        if at + need > ring.capacity or (2 * need <= _HOT_BYTES <= at and min(self._tails.tolist()) == self._head):
            self._make_room(ring.capacity - at + need)
            _FRAME.pack_into(ring.data, at, _SKIP)
            self._head += ring.capacity - at
            at = 0
        self._make_room(need)
        _FRAME.pack_into(ring.data, at, len(part) | (_MORE if more else 0))
        ring.data[at + _FRAME.size : at + need] = part
        self._head += -(-need // _ALIGN) * _ALIGN
        if more:
            self._publish()

    def _make_room(self, need: int) -> None:
        if self._head + need + _ALIGN <= self._free_until:
            return
        give_up_s = time.monotonic() + self._timeout_s
        while True:
            tails = self._tails.tolist()
            self._free_until = min(tails) + self._ring.capacity
            if self._head + need + _ALIGN <= self._free_until:
                return
            if time.monotonic() > give_up_s:
                slowest = tails.index(min(tails)) + 1
                raise Unavailable(what=f"rank {slowest} has not taken steps for {self._timeout_s:g} s")
            self._publish()  # readers may take what is written so far
            time.sleep(_FULL_PAUSE_S)

    def _publish(self) -> None:
        self._numbers[0] = self._head
        futex_wake(self._word, 1)


class RingReader(Generic[T]):
    """One reading end: the messages of the writer, in order."""

    def __init__(self, path: str, reader: int, num_readers: int, message_type: Any, *, spin_s: float = 0.0) -> None:
        """`spin_s`: seconds for which a wait polls before it sleeps."""
        self.closed = False
        self._segment = Segment.open(path)
        self._ring = _Ring(self._segment, num_readers)
        self._line = (1 + reader) * _LINE
        self._codec: Codec[T] = Codec(message_type)
        self._spin_s = spin_s
        self._tail = 0
        self._partial = b""

    def drain(self, block_s: float = 0.0) -> list[T]:
        """Returns the messages that have arrived. Waits at most `block_s` seconds for a first one."""
        if self._ring.numbers[_HEAD_AT] == self._tail and not self._wait(block_s):
            return []
        messages: list[T] = []
        while self._ring.numbers[_HEAD_AT] != self._tail:
            frame = self._next()
            if frame is not None:
                messages.append(self._codec.decode(frame))
        return messages

    def close(self) -> None:
        """The next `drain` returns at once. Safe in signal handlers."""
        self.closed = True

    def release(self) -> None:
        self._segment.close()

    def _next(self) -> bytes | None:
        """Reads one frame. Returns None if the message continues in the next frame."""
        ring = self._ring
        at = self._tail % ring.capacity
        (length,) = _FRAME.unpack_from(ring.data, at)
        if length == _SKIP:
            self._advance(ring.capacity - at)
            return None
        more, length = bool(length & _MORE), length & ~_MORE
        part = bytes(ring.data[at + _FRAME.size : at + _FRAME.size + length])
        self._advance(-(-(_FRAME.size + length) // _ALIGN) * _ALIGN)
        if more or self._partial:
            self._partial += part
            if more:
                return None
            part, self._partial = self._partial, b""
        return part

    def _advance(self, count: int) -> None:
        self._tail += count
        self._ring.numbers[(self._line + _TAIL_AT) // 8] = self._tail

    def _wait(self, block_s: float) -> bool:
        ring, head = self._ring, self._tail
        now = time.monotonic()
        give_up_s, spin_until_s = now + block_s, now + min(self._spin_s, block_s)
        while now < spin_until_s:
            for _ in range(64):
                if ring.numbers[_HEAD_AT] != head:
                    return True
            now = time.monotonic()
        word = self._segment.address + _HEAD_AT
        while not self.closed and now < give_up_s:
            if ring.numbers[_HEAD_AT] == head:
                futex_wait(word, head & _LOWER, min(_NAP_S, give_up_s - now))
            if ring.numbers[_HEAD_AT] != head:
                futex_wake(word, _WAKES)
                return True
            now = time.monotonic()
        return ring.numbers[_HEAD_AT] != head
