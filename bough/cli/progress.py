"""What a starting server is doing: a bar on a terminal, plain lines elsewhere; by bytes where bytes are read."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

from bough.config.memory_plan import show_bytes

if TYPE_CHECKING:
    from bough.ipc import Status

_LINE_EVERY_S = 5.0
"""Between two plain lines of one phase."""


class Progress:
    """Hears how far the start has come, and shows it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar = self._stream.isatty()
        self._what = ""
        self._since = 0.0
        self._line_s = 0.0
        self._first_bytes = 0

    def __call__(self, status: Status) -> None:
        """A status of the engine's."""
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

    def downloading(self, model: str) -> DownloadProgress:
        """Hears of the bytes of a download."""
        return DownloadProgress(self, f"downloading {model}")

    def show(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """So many bytes of a phase are done."""
        self._begin(what, done_bytes)
        text = f"{what}: {self._told(done_bytes, total_bytes)}"
        if self._bar:
            self._draw(done_bytes / total_bytes, text)
            return
        now = time.monotonic()
        if now - self._line_s >= _LINE_EVERY_S or (done_bytes == total_bytes and now - self._since >= _LINE_EVERY_S):
            self._line_s = now
            print(text, file=self._stream, flush=True)

    def done(self) -> None:
        """Nothing more comes: the bar goes."""
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

    def _told(self, done_bytes: int, total_bytes: int) -> str:
        """How much, how fast, how long still."""
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


class DownloadProgress:
    """A `Progress` as a download calls it."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._what = what

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self._progress.show(self._what, done_bytes, total_bytes)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )
