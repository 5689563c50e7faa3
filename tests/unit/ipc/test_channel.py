import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bough.core.errors import Unavailable
from bough.core.messages import Abort, AbortByName, GetInfo, ToEngine
from bough.ipc import AsyncInbox, AsyncOutbox, Endpoints, Inbox, MessageTooLarge, Outbox
from bough.ipc.endpoints import PrivateDirectory, sweep


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    private = PrivateDirectory()
    yield private.endpoints
    private.remove()


def test_messages_arrive_in_order(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = Outbox(endpoints.engine)
    outbox.send_all(Abort(i) for i in range(100))
    got: list[ToEngine] = []
    while len(got) < 100:
        got += inbox.drain(block_s=1)
    assert got == [Abort(i) for i in range(100)]
    outbox.close()
    inbox.release()


def test_a_writer_may_come_before_the_reader(endpoints: Endpoints) -> None:
    outbox = Outbox(endpoints.engine)
    outbox.send(GetInfo(1))
    time.sleep(0.05)
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    assert _collect(inbox, 1) == [GetInfo(1)]
    outbox.close()
    inbox.release()


def test_malformed_frames_are_dropped_and_counted(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(endpoints.engine)
    for frame in (
        b"",
        b"\xff\xff",
        msgspec.msgpack.encode({"type": "abort", "id": "not a number"}),
        msgspec.msgpack.encode({"type": "no such message"}),
        msgspec.msgpack.encode(Abort(5)),
    ):
        raw.sendall(len(frame).to_bytes(8, "little") + frame)
    assert _collect(inbox, 1) == [Abort(5)]
    assert inbox.num_malformed == 4
    raw.sendall((1000).to_bytes(8, "little") + b"a stump")
    raw.close()
    give_up_s = time.monotonic() + 30
    while inbox.num_malformed == 4 and time.monotonic() < give_up_s:
        assert inbox.drain(block_s=0.2) == []
    assert inbox.num_malformed == 5
    inbox.release()


@pytest.mark.parametrize("size", [1, 7, 4093, 1 << 16])
def test_frames_may_arrive_in_pieces(endpoints: Endpoints, size: int) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    sent = [Abort(i, "x" * length) for i, length in enumerate((0, 1, 300, 70_000 if size > 100 else 900, 5))]
    if size == 1 << 16:
        sent.append(Abort(9, "y" * (3 << 20)))
        sent.append(Abort(10, "z"))
    frames = [msgspec.msgpack.encode(each) for each in sent]
    stream = b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)

    def write() -> None:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(endpoints.engine)
            for begin in range(0, len(stream), size):
                raw.sendall(stream[begin : begin + size])

    writer = threading.Thread(target=write)
    writer.start()
    assert _collect(inbox, len(sent)) == sent
    writer.join()
    assert inbox.num_malformed == 0
    inbox.release()


def test_a_large_frame_is_whole_with_its_last_byte_only(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    sent = Abort(9, "y" * (1 << 20))
    frame = msgspec.msgpack.encode(sent)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(endpoints.engine)
        writer = threading.Thread(target=raw.sendall, args=(len(frame).to_bytes(8, "little") + frame[:-1],))
        writer.start()
        taken: list[ToEngine] = []
        while writer.is_alive():
            taken += inbox.drain(0.01)
        writer.join()
        taken += inbox.drain(0.05)
        assert (taken, inbox.num_malformed) == ([], 0)
        raw.sendall(frame[-1:])
        assert _collect(inbox, 1) == [sent]
    inbox.release()


def test_a_writer_never_waits_for_its_reader(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = Outbox(endpoints.engine)
    sent = [Abort(i, "x" * 100_000) for i in range(200)]
    started = time.monotonic()
    outbox.send_all(sent[:100])
    for message in sent[100:]:
        outbox.send(message)
    assert time.monotonic() - started < 60
    outbox.close(wait_s=60)
    assert _collect(inbox, 200) == sent
    inbox.release()


def test_a_bounded_writer_refuses_more_until_its_reader_goes_on(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = Outbox(endpoints.engine, max_held_bytes=1 << 20)
    number = itertools.count()

    def send_until_refused() -> None:
        while True:
            outbox.send_all([Abort(next(number), "x" * 100_000)])

    with pytest.raises(Unavailable, match="does not take requests"):
        send_until_refused()
    taken = next(number) - 1
    assert 10 < taken < 200, "what the kernel takes, and a megabyte more"
    outbox.send(Abort(taken))
    assert [each.id for each in _collect(inbox, taken + 1)] == list(range(taken + 1))
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:  # the writer's thread counts what has left a moment later
        with contextlib.suppress(Unavailable):
            outbox.send_all([Abort(-1)])
            break
    assert _collect(inbox, 1) == [Abort(-1)]
    outbox.close()
    inbox.release()


def test_a_writer_finds_a_reader_that_was_replaced(endpoints: Endpoints) -> None:
    first: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = Outbox(endpoints.engine)
    outbox.send(Abort(1))
    assert _collect(first, 1) == [Abort(1)]
    first.release()
    second: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox.send(Abort(2))
    assert _collect(second, 1) == [Abort(2)]
    outbox.close()
    second.release()


def test_a_frame_that_was_half_taken_is_not_sent_again(endpoints: Endpoints) -> None:
    """Whoever took a part of it may have acted on it. What follows arrives whole, at whoever reads next."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(endpoints.engine)
    door.listen(1)
    outbox = Outbox(endpoints.engine)
    outbox.send_all([Abort(1, "x" * 40_000_000), Abort(2)])  # more than a socket holds
    first, _ = door.accept()
    assert len(first.recv(1000)) == 1000
    door.close()
    os.unlink(endpoints.engine)
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    first.close()
    outbox.send(Abort(3))
    assert [message.id for message in _collect(inbox, 2)] == [2, 3]  # type: ignore[union-attr]
    assert not inbox.drain(block_s=0.2)
    assert inbox.num_malformed == 0
    outbox.close()
    inbox.release()


def test_waiting_costs_no_processor_time_once_nothing_comes(endpoints: Endpoints) -> None:
    """The busy beginning of a wait is bounded, and there is none without a message before it."""
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine, spin_s=0.05)
    outbox = Outbox(endpoints.engine)
    for expected_s in (0.0, 0.05):
        started = time.thread_time()
        assert inbox.drain(block_s=1) == []
        spent_s = time.thread_time() - started
        assert spent_s < expected_s + 0.2
        outbox.send(Abort(1))
        assert _collect(inbox, 1) == [Abort(1)]
    outbox.close()
    inbox.release()


def test_a_message_beyond_the_limit_does_not_leave(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine, max_bytes=1000)
    outbox = Outbox(endpoints.engine, max_bytes=1000)
    with pytest.raises(MessageTooLarge, match="bytes"):
        outbox.send(Abort(1, "x" * 2000))
    outbox.send(Abort(2))
    assert _collect(inbox, 1) == [Abort(2)]
    outbox.close()
    inbox.release()


def test_a_reader_survives_a_frame_beyond_its_limit(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine, max_bytes=1000)
    careless, careful = Outbox(endpoints.engine, max_bytes=1 << 20), Outbox(endpoints.engine)
    careless.send(Abort(1, "x" * 5000))
    careful.send(Abort(2))
    assert _collect(inbox, 1) == [Abort(2)]
    careless.close()
    careful.close()
    inbox.release()


def test_close_ends_a_wait_from_another_thread(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    started = time.monotonic()
    threading.Timer(0.05, inbox.close).start()
    assert inbox.drain(block_s=100) == []
    assert inbox.closed
    assert time.monotonic() - started < 60
    inbox.release()


def test_an_empty_inbox_does_not_block(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    took_s = []
    for _ in range(100):
        started = time.monotonic()
        assert inbox.drain() == []
        took_s.append(time.monotonic() - started)
    assert sorted(took_s)[50] < 0.01
    inbox.release()


async def test_a_turn_of_the_loop_sends_its_first_message_at_once_and_the_rest_together(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = AsyncOutbox(endpoints.engine)
    for turn in (0, 10):
        for at in range(3):
            outbox.send_all([Abort(turn + at)])
        assert inbox.drain() == [Abort(turn)]
        await asyncio.sleep(0)
        assert inbox.drain() == [Abort(turn + 1), Abort(turn + 2)]
    outbox.close()
    inbox.release()


async def test_what_was_gathered_leaves_before_a_single_message_and_when_it_is_much(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = AsyncOutbox(endpoints.engine)
    outbox.send_all([Abort(0)])
    outbox.send_all([Abort(1)])
    outbox.send(GetInfo(2))
    assert inbox.drain() == [Abort(0), Abort(1), GetInfo(2)]
    for at in range(100):
        outbox.send_all([Abort(at)])
    assert len(inbox.drain()) >= 64
    outbox.close()
    await asyncio.sleep(0)
    inbox.release()


async def test_what_was_gathered_leaves_before_the_writer_closes(endpoints: Endpoints) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = AsyncOutbox(endpoints.engine)
    outbox.send_all([Abort(0)])
    outbox.send_all([Abort(1)])
    outbox.close()
    assert _collect(inbox, 2) == [Abort(0), Abort(1)]
    inbox.release()


async def test_the_async_inbox_hears_all_messages(endpoints: Endpoints) -> None:
    got: list[ToEngine] = []
    all_there = asyncio.Event()

    def hear(messages: list[ToEngine]) -> None:
        assert messages
        got.extend(messages)
        if len(got) == 9000:
            all_there.set()

    inbox: AsyncInbox[ToEngine] = AsyncInbox(endpoints.api(3), ToEngine, hear)
    outbox = Outbox(endpoints.api(3))
    for i in range(9000):
        outbox.send(Abort(i))
        if i % 1000 == 0:
            await asyncio.sleep(0.001)
    await asyncio.wait_for(all_there.wait(), 60)
    assert got == [Abort(i) for i in range(9000)]
    inbox.close()
    inbox.close()
    outbox.send(Abort(0))
    await asyncio.sleep(0.02)
    assert len(got) == 9000, "nothing is heard once it is closed"
    outbox.close(0)


async def test_the_async_inbox_hears_many_writers_large_messages_and_those_after_a_broken_one(
    endpoints: Endpoints,
) -> None:
    got: list[ToEngine] = []
    inbox: AsyncInbox[ToEngine] = AsyncInbox(endpoints.api(0), ToEngine, got.extend)
    writers = [Outbox(endpoints.api(0)) for _ in range(5)]
    large = AbortByName(7, "x" * 3_000_000)
    for at, writer in enumerate(writers):
        writer.send(Abort(at))
        writer.send(large)
    broken = socket.socket(socket.AF_UNIX)
    broken.connect(endpoints.api(0))
    broken.sendall(b"\xff" * 16)
    give_up_s = time.monotonic() + 60
    while len(got) < 10 or not inbox.num_malformed:
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.001)
    assert sorted(each.id for each in got if isinstance(each, Abort)) == [0, 1, 2, 3, 4]
    assert [each for each in got if isinstance(each, AbortByName)] == [large] * 5
    assert inbox.num_malformed == 1
    writers[0].send(Abort(9))
    while got[-1] != Abort(9):
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.001)
    for writer in writers:
        writer.close()
    broken.close()
    inbox.close()


def test_many_small_messages_a_second(endpoints: Endpoints) -> None:
    """Through another process and back to this one: at least as fast as a plain pipe of JSON lines would be."""
    program = (
        "import sys, time; from bough.ipc import Endpoints, Outbox\n"
        "from bough.core.messages import Abort\n"
        "outbox = Outbox(Endpoints(sys.argv[1]).engine)\n"
        "for i in range(50_000): outbox.send(Abort(i))\n"
        "outbox.close(100); outbox.join(time.monotonic() + 100)\n"
    )
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    writer = subprocess.Popen([sys.executable, "-c", program, endpoints.directory])
    first = _collect(inbox, 1)
    cpu_started = time.thread_time()
    rest = _collect(inbox, 50_000 - len(first))
    assert len(first) + len(rest) == 50_000
    assert rest[-1] == Abort(49_999)
    assert time.thread_time() - cpu_started < 4
    assert writer.wait(60) == 0
    inbox.release()


def test_the_directory_is_private_and_short() -> None:
    private = PrivateDirectory()
    assert stat.S_IMODE(private.path.stat().st_mode) == 0o700
    assert len(private.endpoints.api(9999)) <= 107
    private.remove()
    private.remove()
    assert not private.path.exists()


def test_a_long_temporary_directory_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    private = PrivateDirectory()
    assert len(private.endpoints.api(9999)) <= 107
    private.remove()


def test_a_directory_swept_up_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    swept: list[int] = []
    flock = fcntl.flock

    def another_starts_meanwhile(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.append(sweep(tmp_path))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", another_starts_meanwhile)
    private = PrivateDirectory()
    assert swept == [1]
    assert private.path.is_dir()
    assert sweep(tmp_path) == 0
    private.remove()
    assert list(tmp_path.iterdir()) == []


def test_sweeping_removes_only_what_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(tempfile.mkdtemp(prefix="b"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))
    held = PrivateDirectory()
    abandoned = root / "bough-abandoned"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    foreign = root / "bough-without-lock"
    foreign.mkdir()
    assert sweep(root) == 1
    assert held.path.exists()
    assert foreign.exists()
    assert not abandoned.exists()
    held.remove()
    foreign.rmdir()
    root.rmdir()


def _collect(inbox: Inbox[ToEngine], at_least: int) -> list[ToEngine]:
    got: list[ToEngine] = []
    deadline = time.monotonic() + 60
    while len(got) < at_least and time.monotonic() < deadline:
        got += inbox.drain(block_s=0.5)
    return got


def test_nothing_is_left_open(endpoints: Endpoints) -> None:
    before = set(os.listdir("/proc/self/fd"))
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = Outbox(endpoints.engine)
    outbox.send(Abort(1))
    assert _collect(inbox, 1) == [Abort(1)]
    outbox.close()
    inbox.release()
    inbox.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_both_ends_outlive_a_lack_of_descriptors(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine)
    outbox = Outbox(endpoints.engine)
    lacking = [True]

    def scarce(make: Callable[..., socket.socket]) -> Callable[..., socket.socket]:
        def made(*arguments: Any) -> Any:
            if lacking[0]:
                raise OSError(errno.EMFILE, "too many open files")
            return make(*arguments)

        return made

    monkeypatch.setattr(socket, "socket", scarce(socket.socket))
    outbox.send(Abort(1))
    monkeypatch.undo()
    inbox._door = _Full(inbox._door, lacking)  # type: ignore[assignment]
    assert inbox.drain(block_s=0.3) == []
    lacking[0] = False
    assert _collect(inbox, 1) == [Abort(1)]
    outbox.close()
    inbox.release()


class _Full:
    """A listening socket in a process without descriptors."""

    def __init__(self, door: socket.socket, lacking: list[bool]) -> None:
        self._door = door
        self._lacking = lacking

    def accept(self) -> Any:
        if self._lacking[0]:
            raise OSError(errno.EMFILE, "too many open files")
        return self._door.accept()

    def fileno(self) -> int:
        return self._door.fileno()

    def close(self) -> None:
        self._door.close()
