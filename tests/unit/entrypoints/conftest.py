from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import Answer, FakeServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A server that answers "Hello there." to everything."""
    with serving(Answer()) as running:
        yield running
