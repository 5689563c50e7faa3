"""One `bough serve` with the default model, shared by the tests that need sense in the answers."""

from __future__ import annotations

import atexit
import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def default_server() -> str:
    """Its address. Started by the first test that asks, ended with the test run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bough", "serve", "--port", "0", "--max-queued-requests", "64"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, process_group=0,
    )  # fmt: skip
    atexit.register(_end, process)
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/v1", line)
        if found:
            _drain(process)
            return found[1]
    raise AssertionError("the server did not start:\n" + "".join(said))


def _drain(process: subprocess.Popen[str]) -> None:
    """Keeps reading, so that the server never waits for its log to be read."""
    import threading

    assert process.stdout is not None
    stdout = process.stdout
    threading.Thread(target=lambda: [None for _ in stdout], daemon=True).start()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
