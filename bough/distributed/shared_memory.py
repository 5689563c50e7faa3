"""Collectives of ranks on one machine: each writes what it brings into shared memory, and reads the others'.

Every rank has a slot, and a word that counts how often it has come (`Places`). A call fills the slot, counts on, waits for
the others, and reads. Calls alternate between two sets of slots: when a rank fills one again, all others have begun the
call between, and so have read it.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from bough.distributed.collectives import RankLost, ordered_sum
from bough.ipc.segment import Segment
from bough.kernels.cpu_build import library
from bough.platform.futex import STORES_STAY_IN_ORDER, futex_wait, futex_wake
from bough.platform.processor import usable_cpus

SLOT_BYTES = 1 << 22
"""Of a rank's slot. What is longer goes through it in parts."""
_MAIL_BYTES = 1 << 20
_MAIL_PARTS = 8
"""The mailbox between two ranks: its capacity in bytes and in parts, sent but not yet received."""
_TWO_SHOT_BYTES = 1 << 17
"""With more than two ranks, from this size on each sums a part for all, instead of every rank the whole."""
_PLACE_BYTES = 64
_PAGE = 4096
_SLICE_S = 0.2
"""A wait returns to Python this often, to run signal handlers and to see whether the group is broken."""
_NAP_S = 0.001
SPIN_S = 1e-4
"""A wait begins busily for so long where each rank has a core: about what the slowest of equal ranks is behind."""
_SUMMED: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3, torch.int32: 4}
"""Types that are summed in the compiled kernels, by their number there."""


_LEAST_PATIENCE_S = 20.0
_STEPS_OF_PATIENCE = 20.0
"""A rank that is this many of the slowest steps so far behind the others, and at least that many seconds, hangs. Between two
collectives ranks differ by a part of one layer."""


class Patience:
    """How long a rank waits for the others. One object for all collectives of a rank: at the start it is given, later it
    follows what steps cost."""

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._slowest_s = 0.0

    def saw_step(self, seconds: float) -> None:
        """A step has taken so long."""
        if seconds > self._slowest_s:
            self._slowest_s = seconds
            self.timeout_s = max(_LEAST_PATIENCE_S, _STEPS_OF_PATIENCE * seconds)


class Places(Protocol):
    """Words in shared memory that count up, and those who wait for them."""

    def arrive(self, address: int, count: int) -> None: ...

    def wait(self, first: int, number: int, count: int, spin_s: float) -> bool:
        """Whether `number` places from address `first` on have come to `count` within a moment."""
        ...


class NativePlaces:
    """In compiled code."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self.arrive = kernels.bough_arrive
        self._await = kernels.bough_await

    def wait(self, first: int, number: int, count: int, spin_s: float) -> bool:
        return bool(self._await(first, number, count, int(spin_s * 1e9), int(_SLICE_S * 1e9)))


class PythonPlaces:
    """In Python, where nothing may be compiled. Needs a processor whose stores stay in order."""

    def __init__(self, segment: Segment) -> None:
        self._base = segment.address
        self._words = memoryview(segment.memory).cast("I")

    def arrive(self, address: int, count: int) -> None:
        self._words[(address - self._base) // 4] = count
        futex_wake(address)

    def wait(self, first: int, number: int, count: int, spin_s: float) -> bool:
        until_s = time.monotonic() + _SLICE_S
        spin_until_s = time.monotonic() + spin_s
        for place in range(number):
            address = first + place * _PLACE_BYTES
            at = (address - self._base) // 4
            while ((seen := self._words[at]) - count) & 0x80000000:
                now = time.monotonic()
                if now > until_s:
                    return False
                if now > spin_until_s:
                    futex_wait(address, seen, _NAP_S)
        return True


def segment_bytes(size: int) -> int:
    """Of the memory that `size` ranks share. Only what is used of it exists."""
    return _slots_at(size) + 2 * size * SLOT_BYTES + size * size * _MAIL_BYTES * _MAIL_PARTS


def _slots_at(size: int) -> int:
    places = 1 + size + 2 * size * size  # whether it is broken; arrivals; for each pair of ranks, parts sent and taken
    return math.ceil(places * _PLACE_BYTES / _PAGE) * _PAGE


class SharedMemoryCollectives:
    """One rank's end of a segment that `segment_bytes` long, and zero at first."""

    def __init__(
        self, segment: Segment, rank: int, size: int, *, patience: Patience | None = None, native: bool = True
    ) -> None:
        """`native`: with compiled code where that can be had."""
        self._segment = segment
        self._rank, self._size = rank, size
        self._patience = patience or Patience()
        base = segment.address
        self._words = memoryview(segment.memory).cast("I")
        self._arrivals = base + _PLACE_BYTES
        self._mine = self._arrivals + rank * _PLACE_BYTES
        self._mail_places = self._arrivals + size * _PLACE_BYTES
        self._slots = [base + _slots_at(size) + half * size * SLOT_BYTES for half in (0, 1)]
        self._mail = self._slots[1] + size * SLOT_BYTES
        self._count = 0
        self._calls = 0
        self._sent = [0] * size
        self._got = [0] * size
        self._spin_s = SPIN_S if usable_cpus() >= size else 0.0
        kernels = library() if native else None
        self._places: Places = PythonPlaces(segment) if kernels is None else NativePlaces(kernels)
        self._kernels = kernels

    @staticmethod
    def possible() -> bool:
        """Whether ranks on this machine can meet this way."""
        return library() is not None or STORES_STAY_IN_ORDER

    # -- the collectives -------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        at, item, total = x.data_ptr(), x.element_size(), x.numel()
        per_call = SLOT_BYTES // item
        for begin in range(0, total, per_call):
            count = min(per_call, total - begin)
            if self._size > 2 and count * item >= _TWO_SHOT_BYTES:
                self._two_shot(x.dtype, at + begin * item, count, item)
            else:
                slots = self._publish(at + begin * item, count * item)
                self._meet("all_reduce")
                self._add_up(x.dtype, slots, at + begin * item, count, item)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self._size, *x.shape)
        at, to, total = x.data_ptr(), out.data_ptr(), x.nbytes
        for begin in range(0, total, SLOT_BYTES):
            count = min(SLOT_BYTES, total - begin)
            slots = self._publish(at + begin, count)
            self._meet("all_gather")
            for rank in range(self._size):
                ctypes.memmove(to + rank * total + begin, slots + rank * SLOT_BYTES, count)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape[1:])
        item, total = x.element_size(), out.numel()
        per_call = SLOT_BYTES // (item * self._size)
        for begin in range(0, total, per_call):
            count = min(per_call, total - begin)
            slots = self._next_slots()
            for rank in range(self._size):
                source = x.data_ptr() + (rank * total + begin) * item
                ctypes.memmove(slots + self._rank * SLOT_BYTES + rank * count * item, source, count * item)
            self._meet("reduce_scatter")
            mine = slots + self._rank * count * item
            self._add_up(x.dtype, mine, out.data_ptr() + begin * item, count, item)
        return out

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(sum(receive), *x.shape[1:])
        width = x.element_size() * math.prod(x.shape[1:])
        begins = torch.tensor([0, *torch.tensor(send).cumsum(0).tolist()]) * width
        every = self.all_gather(begins).tolist()  # where each rank's bytes for each other begin
        wanted = [int(count) * width for count in receive]
        have = [int(line[self._rank + 1]) - int(line[self._rank]) for line in every]
        if have != wanted:
            raise RankLost(what=f"{have} bytes come from ranks, {wanted} were expected")
        targets = [sum(wanted[:rank]) for rank in range(self._size)]
        for begin in range(0, max(line[-1] for line in every), SLOT_BYTES):
            slots = self._publish(x.data_ptr() + begin, max(0, min(SLOT_BYTES, int(every[self._rank][-1]) - begin)))
            self._meet("all_to_all")
            for rank, line in enumerate(every):
                first, last = max(line[self._rank], begin), min(line[self._rank + 1], begin + SLOT_BYTES)
                if first < last:
                    to = out.data_ptr() + targets[rank] + first - line[self._rank]
                    ctypes.memmove(to, slots + rank * SLOT_BYTES + first - begin, last - first)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        out = x.contiguous()
        for begin in range(0, out.nbytes, SLOT_BYTES):
            count = min(SLOT_BYTES, out.nbytes - begin)
            at = out.data_ptr() + begin
            slots = self._publish(at, count if self._rank == source else 0)
            self._meet("broadcast")
            if self._rank != source:
                ctypes.memmove(at, slots + source * SLOT_BYTES, count)
        return out if out is x else x.copy_(out)

    def send(self, x: Tensor, to: int) -> None:
        x = x.contiguous()
        sent_at, taken_at, mail = self._mailbox(self._rank, to)
        for begin in range(0, x.nbytes, _MAIL_BYTES):
            number = self._sent[to] = self._sent[to] + 1
            if number > _MAIL_PARTS:
                self._await(taken_at, 1, number - _MAIL_PARTS, f"send: rank {to} does not take what is sent")
            part = mail + (number % _MAIL_PARTS) * _MAIL_BYTES
            ctypes.memmove(part, x.data_ptr() + begin, min(_MAIL_BYTES, x.nbytes - begin))
            self._places.arrive(sent_at, number & 0xFFFFFFFF)

    def receive(self, x: Tensor, source: int) -> Tensor:
        assert x.is_contiguous(), "what is received needs a place of its own"
        sent_at, taken_at, mail = self._mailbox(source, self._rank)
        for begin in range(0, x.nbytes, _MAIL_BYTES):
            number = self._got[source] = self._got[source] + 1
            self._await(sent_at, 1, number, f"receive: rank {source} does not send")
            part = mail + (number % _MAIL_PARTS) * _MAIL_BYTES
            ctypes.memmove(x.data_ptr() + begin, part, min(_MAIL_BYTES, x.nbytes - begin))
            self._places.arrive(taken_at, number & 0xFFFFFFFF)
        return x

    def barrier(self) -> None:
        self._next_slots()
        self._meet("barrier")

    def close(self) -> None:
        self._segment.close()

    def break_up(self) -> None:
        """Every rank that waits, or comes later, gets `RankLost`."""
        self._words[0] = 1

    # -- inside ----------------------------------------------------------------------------------------------------

    def _next_slots(self) -> int:
        """The address of the slots that this call uses."""
        self._calls += 1
        return self._slots[self._calls & 1]

    def _publish(self, at: int, num_bytes: int) -> int:
        """Fills this rank's slot. Returns where the slots begin."""
        slots = self._next_slots()
        ctypes.memmove(slots + self._rank * SLOT_BYTES, at, num_bytes)
        return slots

    def _two_shot(self, dtype: torch.dtype, at: int, count: int, item: int) -> None:
        """Each rank adds up its part of what all have brought, and takes the other parts from the others."""
        slots = self._publish(at, count * item)
        self._meet("all_reduce")
        bounds = [count * rank // self._size for rank in range(self._size + 1)]
        low, high = bounds[self._rank] * item, bounds[self._rank + 1] * item
        # No other rank reads this part of this rank's slot before the sum is in it.
        self._add_up(dtype, slots + low, slots + self._rank * SLOT_BYTES + low, (high - low) // item, item)
        self._meet("all_reduce")
        for rank in range(self._size):
            low, high = bounds[rank] * item, bounds[rank + 1] * item
            ctypes.memmove(at + low, slots + rank * SLOT_BYTES + low, high - low)

    def _add_up(self, dtype: torch.dtype, parts: int, out: int, count: int, item: int) -> None:
        """Sums arrays that lie a slot apart."""
        number = _SUMMED.get(dtype)
        if self._kernels is not None and number is not None:
            self._kernels.bough_ordered_sum(number, parts, SLOT_BYTES, self._size, out, count)
            return
        views = [_view(parts + rank * SLOT_BYTES, count, item, dtype) for rank in range(self._size)]
        _view(out, count, item, dtype).copy_(ordered_sum(views))

    def _meet(self, what: str) -> None:
        self._count = (self._count + 1) & 0xFFFFFFFF
        self._places.arrive(self._mine, self._count)
        self._await(self._arrivals, self._size, self._count, what)

    def _await(self, first: int, number: int, count: int, what: str) -> None:
        count &= 0xFFFFFFFF
        if self._places.wait(first, number, count, self._spin_s):
            return
        give_up_s = time.monotonic() + self._patience.timeout_s - _SLICE_S
        while not self._places.wait(first, number, count, 0.0):
            if self._words[0]:
                raise RankLost(what="another rank has ended the group")
            if time.monotonic() > give_up_s:
                raise RankLost(
                    what=f"{what}: {self._absent(count) if number > 1 else 'it'} did not come within "
                    f"{self._patience.timeout_s:.3g} s",
                    why="it has died, was stopped, or computes something else",
                    fix="see that rank's log lines",
                )

    def _absent(self, count: int) -> str:
        late = [
            rank for rank in range(self._size) if (self._words[_PLACE_BYTES // 4 * (1 + rank)] - count) & 0x80000000
        ]
        return ", ".join(f"rank {rank}" for rank in late)

    def _mailbox(self, source: int, to: int) -> tuple[int, int, int]:
        """Places that count parts sent and taken, and where the parts lie."""
        pair = source * self._size + to
        places = self._mail_places + 2 * pair * _PLACE_BYTES
        return places, places + _PLACE_BYTES, self._mail + pair * _MAIL_BYTES * _MAIL_PARTS


def _view(address: int, count: int, item: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * (count * item)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype) if count else torch.empty(0, dtype=dtype)
