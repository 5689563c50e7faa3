"""What a caller's loop waits with: it finds everything that is there, soon, and is busy only within its time."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from bough.engine_client.selector import CallerSelector


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


@pytest.fixture(params=[0.0, 0.1], ids=["sleeps", "stays-awake"])
def selector(request: pytest.FixtureRequest, pair: tuple[socket.socket, socket.socket]) -> Iterator[CallerSelector]:
    made = CallerSelector()
    made.register(pair[0], selectors.EVENT_READ)
    made.stay_awake(request.param)
    yield made
    made.close()


def test_a_wait_finds_what_is_there(selector: CallerSelector, pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].send(b"x")
    for timeout in (None, 0.01, 100):
        ((key, events),) = selector.select(timeout)
        assert (key.fileobj, events) == (pair[0], selectors.EVENT_READ)


def test_looks_without_waiting_find_it_within_a_few(
    selector: CallerSelector, pair: tuple[socket.socket, socket.socket]
) -> None:
    pair[1].send(b"x")
    for _ in range(3):
        assert [bool(selector.select(timeout)) for timeout in (0, 0, 0, 0, -1, -1, -1, -1)].count(True) == 2


def test_a_wait_ends_with_what_comes_or_its_time(
    selector: CallerSelector, pair: tuple[socket.socket, socket.socket]
) -> None:
    for after_s in (0.02, 0.15):
        threading.Timer(after_s, pair[1].send, (b"x",)).start()
        assert selector.select(30)
        pair[0].recv(1)
    selector.stay_awake(0.02)
    for timeout_s in (0.01, 0.1):
        began_s = time.monotonic()
        assert selector.select(timeout_s) == []
        assert 0.9 * timeout_s < time.monotonic() - began_s < timeout_s + 5


def test_it_is_busy_only_within_its_time(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough.engine_client.selector._LATE_S", 60.0)  # whatever else runs on this machine
    selector = CallerSelector()
    selector.register(pair[0], selectors.EVENT_READ)
    spent_s = []
    for awake_s in (0.0, 0.1, 0.0):
        selector.stay_awake(awake_s)
        began_s = time.thread_time()
        selector.select(0.3)
        spent_s.append(time.thread_time() - began_s)
    asleep_s = max(spent_s[0], spent_s[2])
    assert asleep_s < 0.05
    assert 4 * asleep_s < spent_s[1] < 0.2  # a busy machine gives it less of a processor than it would take
    selector.close()


def test_it_sleeps_where_it_must_share_the_processor(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=iter([0.0, 0.0, 0.0001, 0.0002, 0.01, 0.02, 0.02, 0.03]).__next__)
    selector = CallerSelector()
    selector.register(pair[0], selectors.EVENT_READ)
    waited: list[float | None] = []

    def select(_: object, timeout: float | None = None) -> list[object]:
        waited.append(timeout)
        return []

    monkeypatch.setattr("bough.engine_client.selector.time", clock)
    monkeypatch.setattr(selectors.EpollSelector, "select", select)
    selector.stay_awake(0.05)
    selector.select(1.0)
    assert waited == [0, 0, 0, pytest.approx(0.99)]
    waited.clear()
    selector.select(1.0)
    assert waited == [1.0], "it stays asleep until it is told to stay awake again"
    waited.clear()
    selector.stay_awake(0.009)
    selector.select(1.0)
    assert waited == [0, pytest.approx(0.99)]
    selector.close()


def test_a_loop_that_is_never_idle_still_hears_its_sockets(pair: tuple[socket.socket, socket.socket]) -> None:
    loop = asyncio.SelectorEventLoop(CallerSelector())
    for end in pair:
        end.setblocking(False)

    async def talk() -> list[bytes]:
        busy = asyncio.create_task(always())
        heard = []
        for word in (b"one", b"two", b"three"):
            await loop.sock_sendall(pair[1], word)
            heard.append(await asyncio.wait_for(loop.sock_recv(pair[0], 16), 30))
        busy.cancel()
        return heard

    async def always() -> None:
        while True:
            await asyncio.sleep(0)

    try:
        assert loop.run_until_complete(talk()) == [b"one", b"two", b"three"]
    finally:
        loop.close()
