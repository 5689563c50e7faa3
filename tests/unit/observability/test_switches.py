"""Log switches reach every process that listens, those that come later, and nobody else."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from bough.observability import switches
from bough.observability.log import log_level
from bough.observability.switches import LogListener, LogSwitch, tell_all

CHANGES = 40


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers late on a busy machine has answered all the same."""
    monkeypatch.setattr(switches, "_WAIT_S", 100.0)


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    ours = logging.getLogger("bough")
    before = ours.level
    yield
    ours.setLevel(before)


def _process(directory: Path, name: str, pipe: Connection) -> None:
    told: list[LogSwitch] = []
    LogListener(directory, name, told.append).follow()
    pipe.send("ready")
    while (asked := pipe.recv()) != "end":
        pipe.send((log_level(), [(each.log_level, each.log_requests) for each in told]))
        assert asked == "how?"


def _teller(directory: Path, pipe: Connection, ours: bool) -> None:
    """Changes everything, often; every other change says one thing, so that what is kept is made of several."""
    switches._WAIT_S = 100.0
    pipe.send("ready")
    pipe.recv()
    for turn in range(CHANGES):
        level = ("error" if turn % 4 else "debug") if ours else ("warning" if turn % 4 else "info")
        tell_all(directory, LogSwitch(log_level=level) if turn % 2 else LogSwitch(log_requests=ours))  # type: ignore[arg-type]
    pipe.send("done")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    context = multiprocessing.get_context("spawn")
    running = []

    def one(name: str) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=_process, args=(tmp_path, name, theirs), daemon=True)
        process.start()
        assert ours.recv() == "ready"
        running.append((process, ours))
        return ours

    yield one
    for process, pipe in running:
        if process.is_alive():
            pipe.send("end")
        process.join(60)


def test_all_processes_change(tmp_path: Path, start: object) -> None:
    pipes = [start(name) for name in ("engine", "api1")]  # type: ignore[operator]
    assert tell_all(tmp_path, LogSwitch(log_level="error", log_requests=True)) == ["api1", "engine"]
    assert tell_all(tmp_path, LogSwitch(log_level="debug")) == ["api1", "engine"]
    for pipe in pipes:
        pipe.send("how?")
        assert pipe.recv() == ("debug", [("error", True), ("debug", None)])
    late = start("api2")  # type: ignore[operator]
    late.send("how?")
    assert late.recv() == ("debug", [("debug", True)]), "as if it had heard both"


def test_changes_at_the_same_time_leave_all_processes_alike(tmp_path: Path, start: object) -> None:
    """Two workers are told different things at once: whichever comes last, it comes last everywhere."""
    pipes = [start(name) for name in ("engine", "api1")]  # type: ignore[operator]
    context = multiprocessing.get_context("spawn")
    tellers = [context.Pipe() for _ in range(2)]
    running = [
        context.Process(target=_teller, args=(tmp_path, theirs, ours), daemon=True)
        for ours, (_, theirs) in zip((False, True), tellers, strict=True)
    ]
    for process in running:
        process.start()
    for word in ("ready", "go", "done"):
        for pipe, _ in tellers:
            assert word == "go" or pipe.recv() == word
            if word == "go":
                pipe.send(word)
    for process in running:
        process.join(60)
    pipes.append(start("api2"))  # type: ignore[operator]
    states, heard = [], []
    for pipe in pipes:
        pipe.send("how?")
        level, told = pipe.recv()
        states.append((level, next(requests for _, requests in reversed(told) if requests is not None)))
        heard.append(told)
    assert heard[0] == heard[1], "in one order"
    assert len(heard[0]) == 2 * CHANGES, "none was lost"
    assert states == [states[0]] * 3, "whoever comes later is like the others"


def test_garbage_is_dropped_and_the_dead_are_passed_over(tmp_path: Path) -> None:
    heard: list[LogSwitch] = []
    listener = LogListener(tmp_path, "here", heard.append)
    listener.follow()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for garbage in (b"", b"\x80\x04.", b'{"log_level": "loud"}', b"[]", os.urandom(3000), bytes(4096)):
            stranger.sendto(garbage, str(tmp_path / f"l{os.getpid()}"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
        gone.bind(str(tmp_path / "l999999999"))
    began = time.monotonic()
    assert tell_all(tmp_path, LogSwitch(log_level="warning")) == ["here"]
    assert time.monotonic() - began < 50, "nobody waits for the dead"
    assert heard == [LogSwitch(log_level="warning")]
    assert log_level() == "warning"
    assert not list(tmp_path.glob("t*"))
    listener.close()


def test_one_that_does_not_answer_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "_WAIT_S", 0.5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "l1"))
        began = time.monotonic()
        assert tell_all(tmp_path, LogSwitch(log_level="info")) == []
        assert 0.5 <= time.monotonic() - began < 30
