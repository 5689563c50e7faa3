"""Progress of a start: a bar on a terminal, few plain lines elsewhere."""

from __future__ import annotations

import io

import pytest

from bough.cli import progress as module
from bough.cli.progress import Progress
from bough.ipc import EngineStatus

GIB = 1024**3


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def reading(done: int, what: str = "loading weights") -> EngineStatus:
    return EngineStatus(phase="loading", detail=what, progress=0.3, done_bytes=done * GIB, total_bytes=16 * GIB)


def test_plain_lines_are_few_and_say_how_long(clock: Clock) -> None:
    out = io.StringIO()
    progress = Progress(out)
    progress(EngineStatus(phase="loading", detail="preparing the device", progress=0.1))
    for done in range(17):  # half a gibibyte a second
        progress(reading(done))
        clock.now += 2.0
    progress(EngineStatus(phase="loading", detail="warming up", progress=0.9))
    progress.done()
    assert out.getvalue().splitlines() == [
        "preparing the device ...",
        "loading weights ...",
        "loading weights: 3.00 GiB of 16.00 GiB, 512.00 MiB/s, 26 s left",
        "loading weights: 6.00 GiB of 16.00 GiB, 512.00 MiB/s, 20 s left",
        "loading weights: 9.00 GiB of 16.00 GiB, 512.00 MiB/s, 14 s left",
        "loading weights: 12.00 GiB of 16.00 GiB, 512.00 MiB/s, 8 s left",
        "loading weights: 15.00 GiB of 16.00 GiB, 512.00 MiB/s, 2 s left",
        "loading weights: 16.00 GiB of 16.00 GiB, 512.00 MiB/s",
        "warming up ...",
    ]


def test_what_is_quick_takes_one_line(clock: Clock) -> None:
    out = io.StringIO()
    progress = Progress(out)
    for done in range(17):
        progress(reading(done))
        clock.now += 0.05
    assert out.getvalue() == "loading weights ...\n"


def test_what_was_there_before_is_not_called_speed(clock: Clock) -> None:
    out = io.StringIO()
    progress = Progress(out)
    progress.show("downloading m", 10 * GIB, 16 * GIB)
    clock.now += 6.0
    progress.show("downloading m", 13 * GIB, 16 * GIB)
    assert "512.00 MiB/s, 6 s left" in out.getvalue()


def test_a_bar_on_a_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    progress = Progress(out)
    progress(reading(0))
    clock.now += 4.0
    progress(reading(4))
    assert "\n" not in out.getvalue()
    last = out.getvalue().rpartition("\r\x1b[K")[2]
    assert last.startswith("[" + "#" * 8)
    assert last.endswith("loading weights: 4.00 GiB of 16.00 GiB, 1.00 GiB/s, 12 s left")
    progress(EngineStatus(phase="ready"))
    assert out.getvalue().endswith("\r\x1b[K"), "what is printed next begins a line"


def test_a_narrow_terminal_is_not_overrun(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    Progress(out)(reading(3))
    assert len(out.getvalue().rpartition("\r\x1b[K")[2]) < 40


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59, "59 s"), (61, "1 min 01 s"), (3700, "1 h 01 min")])
def test_durations(seconds: float, text: str) -> None:
    assert module._duration(seconds) == text
