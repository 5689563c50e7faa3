"""Progress of a start or a download: a bar on a terminal, plain lines elsewhere; in bytes where bytes are read."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from bough.config.memory_plan import show_bytes

if TYPE_CHECKING:
    from bough.ipc import EngineStatus

_LINE_EVERY_S = 5.0
"""Seconds between two plain lines of one phase."""


class Progress:
    """Shows progress in the terminal. Call it with the engine's statuses, or use `show` or `reporting` for bytes."""

    def __init__(self, stream: TextIO | io.TextIOBase | None = None) -> None:
        self._stream: Any = stream or sys.stderr
        self._bar = self._stream.isatty()
        self._what = ""
        self._since = 0.0
        self._line_s = 0.0
        self._first_bytes = 0

    def __call__(self, status: EngineStatus) -> None:
        """Shows a status of the engine."""
        if status.phase == "ready":
            self.done()
            return
        what = status.detail or status.phase
        if status.total_bytes:
            self.show(what, status.done_bytes, status.total_bytes)
            return
        self._begin(what)
        if self._bar:
            self._draw(status.progress, what)

    def reporting(self, what: str) -> Callable[[int, int], None]:
        """A function that shows the progress of `what` in bytes."""
        return lambda done_bytes, total_bytes: self.show(what, done_bytes, total_bytes)

    def show(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Shows how many bytes of a phase are done."""
        self._begin(what, done_bytes)
        text = f"{what}: {self._amount(done_bytes, total_bytes)}"
        if self._bar:
            self._draw(done_bytes / total_bytes, text)
            return
        now = time.monotonic()
        if now - self._line_s >= _LINE_EVERY_S or (done_bytes == total_bytes and now - self._since >= _LINE_EVERY_S):
            self._line_s = now
            print(text, file=self._stream, flush=True)

    def done(self) -> None:
        """Removes the bar at the end."""
        if self._bar and self._what:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
        self._what = ""

    def _begin(self, what: str, done_bytes: int = 0) -> None:
        if what == self._what:
            return
        self._what = what
        self._since = self._line_s = time.monotonic()
        self._first_bytes = done_bytes
        if not self._bar:
            print(f"{what} ...", file=self._stream, flush=True)

    def _amount(self, done_bytes: int, total_bytes: int) -> str:
        """Amount, speed and remaining time as text."""
        text = f"{show_bytes(done_bytes)} of {show_bytes(total_bytes)}"
        seconds = time.monotonic() - self._since
        rate = (done_bytes - self._first_bytes) / seconds if seconds > 0.5 else 0.0
        if rate <= 0:
            return text
        left = f", {_duration((total_bytes - done_bytes) / rate)} left" if done_bytes < total_bytes else ""
        return f"{text}, {show_bytes(round(rate))}/s{left}"

    def _draw(self, part: float, text: str) -> None:
        columns = shutil.get_terminal_size().columns
        width = min(30, max(10, columns - 70))
        filled = round(width * part)
        line = f"[{'#' * filled}{'.' * (width - filled)}] {text}"
        print(f"\r\x1b[K{line[: columns - 1]}", end="", file=self._stream, flush=True)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )
