from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bough.lang as sgl

sys.path.insert(0, str(Path(__file__).parent))  # the toy model and the fake server stand beside the tests

from lang_fake_server import FakeServer, serve


@pytest.fixture(scope="session")
def running() -> Iterator[FakeServer]:
    fake = FakeServer()
    server, thread = serve(fake)
    yield fake
    server.should_exit = True
    thread.join(timeout=5)


@pytest.fixture
def fake(running: FakeServer) -> FakeServer:
    """The server, as if freshly started."""
    running.start_anew()
    return running


@pytest.fixture
def backend(fake: FakeServer) -> Iterator[sgl.RuntimeEndpoint]:
    endpoint = sgl.RuntimeEndpoint(fake.url)
    yield endpoint
    endpoint.shutdown()


@pytest.fixture(autouse=True)
def _default_config() -> Iterator[None]:
    before = {name: getattr(sgl.global_config, name) for name in sgl.global_config.__slots__}
    yield
    for name, value in before.items():
        setattr(sgl.global_config, name, value)
