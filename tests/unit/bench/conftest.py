from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the timed server stands beside the tests

from bench_fake_server import TimedServer, serve


@pytest.fixture(scope="session")
def running_timed() -> Iterator[TimedServer]:
    fake = TimedServer()
    server, thread = serve(fake)
    yield fake
    server.should_exit = True
    thread.join(timeout=5)


@pytest.fixture
def timed(running_timed: TimedServer) -> TimedServer:
    """The server, as if freshly started."""
    running_timed.forget()
    return running_timed
