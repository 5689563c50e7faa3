"""`--log-format json` for output that does not come from the logger: libraries and native code write to stderr
directly.

A child process writes to a pipe. Lines that are JSON are copied, other lines become the message of a JSON line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
from typing import BinaryIO

_LONGEST = 1 << 20
_writing = threading.Lock()


def json_line(process: str, message: str, **fields: object) -> str:
    """A log line with `message`."""
    now = time.time()
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    record = {"time": clock, "level": "info", "process": process, "logger": "stderr", "message": message, **fields}
    return json.dumps(record, ensure_ascii=False, default=str)


def as_json(process: str, line: bytes) -> bytes:
    """The line, which ends with a line break, as JSON; nothing, if it is empty."""
    text = line.strip()
    if text.startswith(b"{") and text.endswith(b"}"):
        with contextlib.suppress(ValueError):
            json.loads(text)
            return text + b"\n"
    shown = text.decode(errors="replace")
    return json_line(process, shown).encode() + b"\n" if shown else b""


class JsonText(io.TextIOBase):
    """A text stream whose lines come out of stderr as JSON."""

    def __init__(self, process: str) -> None:
        self._process = process

    def write(self, text: str) -> int:
        for line in filter(None, map(str.strip, text.split("\n"))):
            sys.stderr.write(json_line(self._process, line) + "\n")
            sys.stderr.flush()
        return len(text)


class JsonPipe:
    """Copies what a child process writes to `fileno` to `target` as lines of JSON, until the child ends."""

    def __init__(self, process: str, target: int = 2) -> None:
        self._process = process
        self._target = target
        reading, self._writing = os.pipe()
        self._source: BinaryIO = os.fdopen(reading, "rb")
        self._thread = threading.Thread(target=self._copy, name=f"log-{process}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """The end to write to."""
        return self._writing

    def handed_over(self) -> None:
        """Closes this process's copy of the writing end, which the child now has."""
        os.close(self._writing)

    def join(self, wait_s: float) -> None:
        """Waits for the last lines."""
        self._thread.join(wait_s)

    def _copy(self) -> None:
        with self._source as lines:
            while line := lines.readline(_LONGEST):
                data = as_json(self._process, line)
                with contextlib.suppress(OSError), _writing:
                    left = memoryview(data)
                    while left:
                        left = left[os.write(self._target, left) :]
