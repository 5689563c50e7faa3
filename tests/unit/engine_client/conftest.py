from __future__ import annotations

import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bough.config.concerns import Config, LogConfig
from bough.config.default_model import default_model_path
from bough.engine_client import EngineClient
from bough.launch import Programs, ServerProcesses, start
from bough.tokenizer import Tokenizer, load_tokenizer

WORKERS = itertools.count()
"""Each engine client of a test run is an API worker of its own."""
FAKE = Programs(engine=(str(Path(__file__).with_name("fake_engine.py")),))


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """A shell makes what it starts in the background, and all that this starts, deaf to them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return load_tokenizer(default_model_path())


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcesses]:
    with start(Config(log=LogConfig(log_level="warning")), programs=FAKE) as server:
        server.wait_ready(timeout_s=60)
        yield server


@pytest.fixture
async def engine_client(running: ServerProcesses, smollm: Tokenizer) -> AsyncIterator[EngineClient]:
    opened = EngineClient.from_facts(running.endpoints, running.facts, smollm, worker=next(WORKERS))
    await opened.start()
    yield opened
    await opened.close()
