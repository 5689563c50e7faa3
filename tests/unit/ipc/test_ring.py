"""The ring of steps: every reader sees every message, in order, whatever their sizes and whoever is slow."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from msgspec import Struct

from bough.core.errors import Unavailable
from bough.ipc.ring import RingReader, RingWriter


class Note(Struct):
    number: int
    data: bytes = b""


def readers(writer: RingWriter, count: int, **options: float) -> list[RingReader[Note]]:
    return [RingReader(writer.path, reader, count, Note, **options) for reader in range(count)]


def read(reader: RingReader[Note], count: int, pause_s: float = 0.0) -> list[Note]:
    notes: list[Note] = []
    give_up_s = time.monotonic() + 30
    while len(notes) < count and time.monotonic() < give_up_s:
        notes += reader.drain(0.5)
        if pause_s:
            time.sleep(pause_s)
    return notes


@pytest.mark.parametrize("spin_s", [0.0, 0.01])
def test_all_readers_see_all_messages_of_all_sizes(spin_s: float) -> None:
    rng = random.Random(1)
    sizes = [rng.choice([0, 1, 7, 8, 100, 1000, 3000, 4096, 20_000]) for _ in range(300)]
    notes = [Note(number, rng.randbytes(size)) for number, size in enumerate(sizes)]
    writer = RingWriter(3, capacity=1 << 14)
    seen: dict[int, list[Note]] = {}
    threads = [
        threading.Thread(target=lambda at=at, reader=reader: seen.__setitem__(at, read(reader, len(notes), 0.001 * at)))
        for at, reader in enumerate(readers(writer, 3, spin_s=spin_s))
    ]
    for thread in threads:
        thread.start()
    for note in notes:
        writer.send(note)
        if rng.random() < 0.05:
            time.sleep(0.002)
    for thread in threads:
        thread.join()
    assert [seen[at] for at in range(3)] == [notes] * 3


def test_readers_that_keep_up_see_the_same_memory_again() -> None:
    """It stays in caches. One that is behind gets new memory, and reads what was written before."""
    writer = RingWriter(2)
    quick, slow = readers(writer, 2)
    notes = [Note(number, number.to_bytes(2) * 500) for number in range(400)]
    for note in notes:
        writer.send(note)
        assert quick.drain() == [note]
        assert slow.drain() == [note]
    assert not any(writer._ring.data[1 << 17 :]), "400 KB went through the first 128"
    for note in notes:
        writer.send(note)
        assert quick.drain() == [note]
    assert slow.drain() == notes
    writer.send(notes[0])
    assert quick.drain() == slow.drain() == [notes[0]]
    for each in (quick, slow, writer):
        each.release() if isinstance(each, RingReader) else each.close()


@pytest.mark.parametrize("count", [1, 6])
def test_sleeping_readers_are_woken_at_once(count: int) -> None:
    """The writer wakes one, which wakes others."""
    writer = RingWriter(count)
    woke: list[list[float]] = [[] for _ in range(count)]

    def wait(reader: RingReader[Note], times: list[float]) -> None:
        for _ in range(20):
            assert reader.drain(5.0)
            times.append(time.monotonic())

    threads = [threading.Thread(target=wait, args=each) for each in zip(readers(writer, count), woke, strict=True)]
    for thread in threads:
        thread.start()
    late = []
    for number in range(20):
        time.sleep(0.01)
        sent = time.monotonic()
        writer.send(Note(number))
        while min(map(len, woke)) <= number:
            time.sleep(0.0001)
        late.append(max(times[number] for times in woke) - sent)
    for thread in threads:
        thread.join()
    assert np.median(late) < 0.1, late  # without a wake-up they would sleep for half a second


def test_nothing_comes_from_nothing() -> None:
    writer = RingWriter(1)
    (reader,) = readers(writer, 1)
    began = time.monotonic()
    assert reader.drain(0.05) == []
    assert time.monotonic() - began >= 0.05
    reader.close()
    assert reader.drain(5.0) == []
    assert time.monotonic() - began < 4


def test_a_reader_that_stopped_is_named() -> None:
    writer = RingWriter(2, capacity=1 << 12, timeout_s=0.2)
    first, _ = readers(writer, 2)

    def write() -> None:
        for number in range(100):
            writer.send(Note(number, bytes(200)))
            first.drain()

    with pytest.raises(Unavailable, match="rank 2 has not taken steps"):
        write()
