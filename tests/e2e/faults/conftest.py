from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import Server


@pytest.fixture(scope="package")
def steady() -> Iterator[Server]:
    """A server for tests that leave it as they found it; two API workers, a small queue."""
    with Server("--api-workers", "2", "--max-running-requests", "8", "--max-queued-requests", "40") as server:
        yield server
