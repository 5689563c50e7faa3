"""A server run by this process: what it leaves to whoever runs it when it fails to start."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from bough.cli import serving
from bough.cli.serving import LocalServer, run_in_loop
from bough.config.server_args import build_config
from bough.core.errors import ConfigError
from bough.core.sampling import SamplingParams
from bough.engine_client import Request
from bough.entrypoints.service import Service
from bough.launch import start
from tests.unit.engine_client.conftest import FAKE


def test_a_server_that_failed_to_start_can_still_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `bough run` does at its end: the user is to see why it failed, and nothing else."""
    monkeypatch.setenv("FAKE_ENGINE", "fail")
    monkeypatch.setattr(serving, "start", partial(start, programs=FAKE))
    server = LocalServer(build_config(port=0, log_level="warning"), quiet=True)
    with pytest.raises(ConfigError, match="made of cheese"):
        run_in_loop(server.run(lambda _: None))
    server.stop_now()
    server.stop()


@pytest.mark.parametrize("busy", [True, False])
def test_whoever_stops_a_busy_server_is_told_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, busy: bool
) -> None:
    monkeypatch.setattr(serving, "start", partial(start, programs=FAKE))
    server = LocalServer(build_config(port=0, drain_timeout_s=7, skip_server_warmup=True), quiet=True)
    asked: list[asyncio.Task[None]] = []

    def opened(service: Service) -> None:
        async def ask() -> None:
            if busy:
                await service.engine_client.submit(Request(prompt=[7, 9], sampling=SamplingParams(max_new_tokens=100)))
            server.stop()

        asked.append(asyncio.ensure_future(ask()))

    with caplog.at_level(logging.INFO, "bough.entrypoints.http.worker"):
        run_in_loop(server.run(opened))
    told = [record.getMessage() for record in caplog.records if "get 7 s to end" in record.getMessage()]
    assert len(told) == busy, caplog.text
